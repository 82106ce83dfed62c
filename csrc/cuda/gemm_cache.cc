#include "cuda/gemm_cache.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>

namespace te_flax::cuda {
namespace {

constexpr char kFormat[] = "te_flax cublaslt algorithms 1";

// The C library's files and numbers: with a libstdc++ linked statically, the streams of C++ crash
// in a module of a process that has its own libstdc++ (seen with gcc 13).
struct Close {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, Close>;

std::string ReadAll(std::FILE* file) {
  std::string text;
  char part[4096];
  while (const size_t n = std::fread(part, 1, sizeof(part), file)) text.append(part, n);
  return text;
}

bool ParseLine(const std::string& line, AlgoTable* table) {
  const size_t space = line.find(' ');
  if (space == 0 || space == std::string::npos) return false;
  AlgoWords words = {};
  const char* at = line.c_str() + space;
  for (uint64_t& word : words) {
    char* end = nullptr;
    if (*at != ' ') return false;
    word = std::strtoull(at, &end, 16);
    if (end == at) return false;
    at = end;
  }
  if (*at != '\0') return false;
  (*table)[line.substr(0, space)] = words;
  return true;
}

// Whether all of it was written.
bool Write(std::FILE* file, const AlgoTable& table) {
  std::fprintf(file, "%s\n", kFormat);
  for (const auto& [name, words] : table) {
    std::fputs(name.c_str(), file);
    for (const uint64_t word : words) {
      std::fprintf(file, " %llx", static_cast<unsigned long long>(word));
    }
    std::fputc('\n', file);
  }
  return std::fflush(file) == 0 && std::ferror(file) == 0;
}

}  // namespace

AlgoTable ReadAlgos(const std::string& path, std::string* warning) {
  AlgoTable table;
  const File file(std::fopen(path.c_str(), "r"));
  if (file == nullptr) return table;
  const std::string text = ReadAll(file.get());
  bool first = true, sound = !text.empty();
  for (size_t begin = 0, end; sound && begin < text.size(); begin = end + 1) {
    end = text.find('\n', begin);
    const std::string line = text.substr(begin, end - begin);
    sound = end != std::string::npos && (first ? line == kFormat : ParseLine(line, &table));
    first = false;
  }
  if (!sound) *warning = path + " is damaged: what it lacks is timed again";
  return table;
}

std::string AddAlgo(const std::string& path, const std::string& key, const AlgoWords& words) {
  std::string ignored;
  AlgoTable table = ReadAlgos(path, &ignored);
  table[key] = words;
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), error);
  const std::string own = path + "." + std::to_string(getpid());
  {
    const File file(std::fopen(own.c_str(), "w"));
    if (file == nullptr || !Write(file.get(), table)) {
      std::filesystem::remove(own, error);
      return "cannot write " + own;
    }
  }
  if (std::rename(own.c_str(), path.c_str()) != 0) {
    const std::string why = std::strerror(errno);
    std::filesystem::remove(own, error);
    return "cannot rename " + own + ": " + why;
  }
  return "";
}

}  // namespace te_flax::cuda
