// The algorithms that were timed on this machine, in a text file. No CUDA includes.
#ifndef TE_FLAX_CUDA_GEMM_CACHE_H_
#define TE_FLAX_CUDA_GEMM_CACHE_H_

#include <array>
#include <cstdint>
#include <map>
#include <string>

namespace te_flax::cuda {

using AlgoWords = std::array<uint64_t, 8>;
using AlgoTable = std::map<std::string, AlgoWords>;

// Reads a file. Lines "<key> <8 words in hex>" under one that names the format; a missing file is
// an empty table. A file of another form leaves the entries before the fault and a warning.
AlgoTable ReadAlgos(const std::string& path, std::string* warning);

// Adds one entry: the file is read again, written beside it and renamed into place, so that a
// reader never sees half of it. Of two processes that add at once one entry may be lost, and is
// timed again. Returns why it could not be written, or nothing.
std::string AddAlgo(const std::string& path, const std::string& key, const AlgoWords& words);

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_GEMM_CACHE_H_
