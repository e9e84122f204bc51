// What a gather is measured against: the fastest ways there are to move one contiguous block with several threads.
//
// Contract: each thread copies one contiguous part; no checksum, no chunks. Blocking. For benchmarks only.
#pragma once

#include <cstddef>
#include <string>

namespace memckpt {

enum class CopyMode { memcpy, stream, string };

CopyMode copy_mode(const std::string& name);  // throws std::invalid_argument
void plain_copy(void* target, const void* source, std::size_t nbytes, CopyMode mode, unsigned threads);

}  // namespace memckpt
