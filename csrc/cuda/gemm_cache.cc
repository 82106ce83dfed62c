#include "cuda/gemm_cache.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace te_flax::cuda {
namespace {

constexpr char kFormat[] = "te_flax cublaslt algorithms 1";

bool ParseLine(const std::string& line, AlgoTable* table) {
  std::istringstream stream(line);
  std::string key, rest;
  AlgoWords words = {};
  if (!(stream >> key)) return false;
  for (uint64_t& word : words) {
    if (!(stream >> std::hex >> word)) return false;
  }
  if (stream >> rest) return false;
  (*table)[key] = words;
  return true;
}

}  // namespace

AlgoTable ReadAlgos(const std::string& path, std::string* warning) {
  AlgoTable table;
  std::ifstream file(path);
  if (!file) return table;
  std::string line;
  bool sound = std::getline(file, line) && line == kFormat;
  while (sound && std::getline(file, line)) sound = ParseLine(line, &table);
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
    std::ofstream file(own, std::ios::trunc);
    file << kFormat << "\n" << std::hex;
    for (const auto& [name, entry] : table) {
      file << name;
      for (const uint64_t word : entry) file << " " << word;
      file << "\n";
    }
    file.flush();
    if (!file) {
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
