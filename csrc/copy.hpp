// Jobs over many pieces: gather into a slot, scatter out of it, audit a slot against its sources.
//
// Contract: a file of `file_nbytes` at the start of a SharedMemory is cut into chunks of kChunk bytes (the last may be
// short). A piece is (address, nbytes, offset in the file). Pieces are sorted by offset. Each chunk gets one CRC-32C over
// all its bytes in file order, whatever mixture of pieces and gaps it is made of. The watermark is the number of leading
// chunks that are complete: every byte of them is globally visible before it moves, it never goes back.
//   gather   pieces do not overlap; bytes that no piece covers, and pieces that lie in place already, are only checksummed
//   scatter  pieces may overlap in the file (two targets get the same bytes); targets must not overlap
//   audit    compares pieces with the file, in whole chunks, and reports the pieces that differ
// Addresses are not owned here: whoever starts a job keeps them alive until it is done.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels.hpp"
#include "pool.hpp"
#include "shared_memory.hpp"

namespace memckpt {

constexpr std::size_t kChunk = std::size_t{4} << 20;

struct Pieces {
    std::vector<std::uint64_t> address, nbytes, offset;
    std::size_t size() const noexcept { return address.size(); }
    std::uint64_t end(std::size_t i) const noexcept { return offset[i] + nbytes[i]; }
};

// Throws std::invalid_argument unless the pieces can safely be used with a file of that size.
void check(const Pieces& pieces, std::uint64_t file_nbytes, bool may_overlap);

class CopyJob : public Task {
public:
    std::size_t chunks() const noexcept { return crcs_.size(); }
    std::size_t watermark() const noexcept { return watermark_.load(std::memory_order_acquire); }
    bool has_crcs() const noexcept { return with_crc_; }
    const std::vector<std::uint32_t>& crcs() const noexcept { return crcs_; }  // after done
    std::vector<std::int64_t> bad_chunks() const;                             // after done

protected:
    CopyJob(std::shared_ptr<SharedMemory> file, std::uint64_t file_nbytes, Pieces pieces, bool with_crc, unsigned threads);
    void run(std::size_t unit) final;
    void finished() noexcept final { use_.drop(); }
    virtual std::uint32_t work(std::uint64_t from, std::uint64_t to) noexcept = 0;  // one unit; its CRC

    const Kernels& kernels_;
    const Pieces pieces_;
    const std::uint64_t file_nbytes_;
    unsigned char* const base_;
    const bool with_crc_;
    std::vector<std::uint32_t> expected_;  // empty: nothing to compare with

private:
    std::size_t units_of(std::size_t chunk) const noexcept;

    Use use_;
    std::vector<std::uint32_t> unit_crcs_;
    std::vector<std::uint32_t> crcs_;
    std::vector<std::uint8_t> units_left_;  // per chunk, under mutex_
    std::atomic<std::size_t> watermark_{0};
    std::mutex mutex_;
};

// Without `submit` it is left to the caller to submit it.
std::shared_ptr<CopyJob> gather(Pieces pieces, std::shared_ptr<SharedMemory> target, std::uint64_t file_nbytes, bool with_crc,
                                unsigned threads, bool submit = true);
std::shared_ptr<CopyJob> scatter(std::shared_ptr<SharedMemory> source, std::uint64_t file_nbytes, Pieces pieces,
                                 std::vector<std::uint32_t> expected, unsigned threads);

// Blocking; indices of pieces that differ from the file in the given chunks.
std::vector<std::int64_t> audit(Pieces pieces, const std::shared_ptr<SharedMemory>& file, std::uint64_t file_nbytes,
                                std::vector<std::int64_t> chunks, unsigned threads);
// Blocking; CRC of the given chunks with the bytes of the pieces in place of the file's.
std::vector<std::uint32_t> crc_sources(Pieces pieces, const std::shared_ptr<SharedMemory>& file, std::uint64_t file_nbytes,
                                       std::vector<std::int64_t> chunks, unsigned threads);

}  // namespace memckpt
