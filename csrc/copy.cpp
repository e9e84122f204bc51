// Gather, scatter and audit; see copy.hpp for the contract.
// Build: c++ -std=c++17 -O3 -pthread -c copy.cpp
#include "copy.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "crc32c.hpp"

namespace memckpt {
namespace {

// A chunk is worked on in units, so that few chunks also keep all threads busy and the first is complete sooner.
constexpr std::size_t kUnit = std::size_t{1} << 20;
static_assert(kChunk % kUnit == 0);

// Pieces below kSmall go through a buffer that stays in the first-level cache: the copy loops like long runs.
constexpr std::size_t kSmall = 8192;
constexpr std::size_t kRun = 16384;
constexpr std::size_t kPrefetch = 256;

std::size_t ceil_div(std::uint64_t a, std::uint64_t b) noexcept { return static_cast<std::size_t>((a + b - 1) / b); }

// First piece that ends after `at`. The ends must not decrease.
std::size_t first_ending_after(const Pieces& p, std::uint64_t at) noexcept {
    std::size_t low = 0, high = p.size();
    while (low < high) {
        const std::size_t middle = low + (high - low) / 2;
        if (p.end(middle) > at)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

const void* pointer(std::uint64_t address) noexcept {
    return reinterpret_cast<const void*>(static_cast<std::uintptr_t>(address));
}

inline void prefetch(const void* start) noexcept {
    for (std::size_t k = 0; k < kPrefetch; k += 64) __builtin_prefetch(static_cast<const char*>(start) + k);
}

}  // namespace

void check(const Pieces& p, std::uint64_t file_nbytes, bool may_overlap) {
    if (p.nbytes.size() != p.size() || p.offset.size() != p.size())
        throw std::invalid_argument("addresses, nbytes and offsets differ in length");
    std::uint64_t end = 0;
    for (std::size_t i = 0; i < p.size(); ++i) {
        const auto say = [i](const char* what) {
            throw std::invalid_argument("piece " + std::to_string(i) + ": " + what);
        };
        if (p.offset[i] > file_nbytes || p.nbytes[i] > file_nbytes - p.offset[i]) say("reaches beyond the end of the file");
        if (p.nbytes[i] != 0 && p.address[i] == 0) say("null address");
        if (p.address[i] + p.nbytes[i] < p.address[i]) say("address range wraps around");
        if (i > 0 && p.offset[i] < p.offset[i - 1]) say("offsets are not sorted");
        if (!may_overlap && p.offset[i] < end) say("overlaps the piece before it");
        end = std::max(end, p.end(i));
    }
}

CopyJob::CopyJob(std::shared_ptr<SharedMemory> file, std::uint64_t file_nbytes, Pieces pieces, bool with_crc,
                 unsigned threads)
    : Task(ceil_div(file_nbytes, kUnit), threads),
      kernels_(memckpt::kernels()),
      pieces_(std::move(pieces)),
      file_nbytes_(file_nbytes),
      base_(file->data()),
      with_crc_(with_crc),
      use_(std::move(file)),
      unit_crcs_(ceil_div(file_nbytes, kUnit)),
      crcs_(ceil_div(file_nbytes, kChunk)),
      units_left_(crcs_.size()) {
    for (std::size_t c = 0; c < units_left_.size(); ++c) units_left_[c] = static_cast<std::uint8_t>(units_of(c));
}

std::size_t CopyJob::units_of(std::size_t chunk) const noexcept {
    return ceil_div(std::min<std::uint64_t>(kChunk, file_nbytes_ - std::uint64_t{chunk} * kChunk), kUnit);
}

void CopyJob::run(std::size_t unit) {
    const std::uint64_t from = std::uint64_t{unit} * kUnit, to = std::min<std::uint64_t>(from + kUnit, file_nbytes_);
    unit_crcs_[unit] = work(from, to);
    store_fence();  // before anybody can learn that these bytes are there
    const std::size_t chunk = unit / (kChunk / kUnit);
    std::lock_guard<std::mutex> lock(mutex_);
    if (--units_left_[chunk] != 0) return;
    if (with_crc_) {
        const std::size_t first = chunk * (kChunk / kUnit);
        std::uint32_t crc = unit_crcs_[first];
        for (std::size_t u = first + 1; u < first + units_of(chunk); ++u)
            crc = crc32c::combine(crc, unit_crcs_[u], std::min<std::uint64_t>(kUnit, file_nbytes_ - std::uint64_t{u} * kUnit));
        crcs_[chunk] = crc;
    }
    std::size_t mark = watermark_.load(std::memory_order_relaxed);
    while (mark < chunks() && units_left_[mark] == 0) ++mark;
    watermark_.store(mark, std::memory_order_release);
}

std::vector<std::int64_t> CopyJob::bad_chunks() const {
    std::vector<std::int64_t> bad;
    for (std::size_t c = 0; c < expected_.size(); ++c)
        if (expected_[c] != crcs_[c]) bad.push_back(static_cast<std::int64_t>(c));
    return bad;
}

namespace {

class Gather final : public CopyJob {
public:
    Gather(std::shared_ptr<SharedMemory> target, std::uint64_t file_nbytes, Pieces pieces, bool with_crc, unsigned threads)
        : CopyJob(std::move(target), file_nbytes, std::move(pieces), with_crc, threads) {}

private:
    bool in_place(std::size_t i) const noexcept { return pointer(pieces_.address[i]) == base_ + pieces_.offset[i]; }

    std::uint32_t work(std::uint64_t from, std::uint64_t to) noexcept override {
        alignas(64) unsigned char buffer[kRun];
        std::uint32_t state = crc32c::start(0);
        std::size_t i = first_ending_after(pieces_, from);
        for (std::uint64_t at = from; at < to;) {
            // What lies there already: gaps, and pieces in place.
            std::uint64_t still = at;
            while (still < to) {
                while (i < pieces_.size() && pieces_.end(i) <= still) ++i;  // also empty pieces
                if (i == pieces_.size() || pieces_.offset[i] >= to)
                    still = to;
                else if (pieces_.offset[i] > still)
                    still = pieces_.offset[i];
                else if (in_place(i))
                    still = std::min(to, pieces_.end(i));
                else
                    break;
            }
            if (still > at) {
                if (with_crc_) state = kernels_.crc(state, base_ + at, still - at);
                at = still;
                continue;
            }
            // A piece, or a run of small ones, that has to be moved.
            std::uint64_t part = std::min(to, pieces_.end(i)) - at;
            const void* source = pointer(pieces_.address[i] + (at - pieces_.offset[i]));
            if (part < kSmall) {
                // The next piece is somewhere else in memory: where it starts is fetched while this one is copied.
                std::size_t filled = 0;
                while (filled + part <= kRun) {
                    if (i + 1 < pieces_.size()) prefetch(pointer(pieces_.address[i + 1]));
                    std::memcpy(buffer + filled, pointer(pieces_.address[i] + (at + filled - pieces_.offset[i])), part);
                    filled += part;
                    while (i < pieces_.size() && pieces_.end(i) <= at + filled) ++i;
                    if (i == pieces_.size() || pieces_.offset[i] != at + filled || at + filled >= to || in_place(i)) break;
                    part = std::min(to, pieces_.end(i)) - (at + filled);
                    if (part >= kSmall) break;
                }
                source = buffer;
                part = filled;
            }
            if (with_crc_)
                state = kernels_.copy_crc(state, base_ + at, source, part);
            else
                kernels_.copy(base_ + at, source, part);
            at += part;
        }
        return crc32c::finish(state);
    }
};

class Scatter final : public CopyJob {
public:
    Scatter(std::shared_ptr<SharedMemory> source, std::uint64_t file_nbytes, Pieces pieces, std::vector<std::uint32_t> expected,
            unsigned threads)
        : CopyJob(std::move(source), file_nbytes, std::move(pieces), true, threads) {
        expected_ = std::move(expected);
        reach_.reserve(pieces_.size());
        std::uint64_t reach = 0;
        for (std::size_t i = 0; i < pieces_.size(); ++i) reach_.push_back(reach = std::max(reach, pieces_.end(i)));
    }

private:
    std::uint32_t work(std::uint64_t from, std::uint64_t to) noexcept override {
        std::uint32_t state = crc32c::start(0);
        std::uint64_t at = from;  // all before this is in the checksum
        auto i = static_cast<std::size_t>(std::upper_bound(reach_.begin(), reach_.end(), from) - reach_.begin());
        for (; i < pieces_.size() && pieces_.offset[i] < to; ++i) {
            const std::uint64_t begin = std::max(from, pieces_.offset[i]), end = std::min(to, pieces_.end(i));
            if (end <= begin) continue;
            auto* target = const_cast<void*>(pointer(pieces_.address[i] + (begin - pieces_.offset[i])));
            if (begin > at) {
                state = kernels_.crc(state, base_ + at, begin - at);
                at = begin;
            }
            if (end - begin >= kSmall) {
                const std::uint64_t known = std::min(end, at);  // an alias: these bytes are in the checksum already
                kernels_.copy(target, base_ + begin, known - begin);
                state = kernels_.copy_crc(state, static_cast<unsigned char*>(target) + (known - begin), base_ + known, end - known);
                at = std::max(at, end);
                continue;
            }
            if (end > at) {  // checksum a whole run of small pieces first: their bytes are then in the first-level cache
                std::uint64_t run = end;
                for (std::size_t j = i + 1; j < pieces_.size() && pieces_.offset[j] <= run && run - at < kRun; ++j) {
                    if (pieces_.nbytes[j] >= kSmall) break;
                    run = std::min(to, std::max(run, pieces_.end(j)));
                }
                state = kernels_.crc(state, base_ + at, run - at);
                at = run;
            }
            std::memcpy(target, base_ + begin, end - begin);
        }
        return crc32c::finish(kernels_.crc(state, base_ + at, to - at));
    }

    std::vector<std::uint64_t> reach_;  // furthest end of the pieces so far: never decreases, so it can be searched
};

// Work on chosen chunks without writing anything.
class Audit final : public Task {
public:
    Audit(const std::shared_ptr<SharedMemory>& file, std::uint64_t file_nbytes, Pieces pieces, std::vector<std::int64_t> chunks,
          bool compare, unsigned threads)
        : Task(chunks.size(), threads),
          kernels_(memckpt::kernels()),
          pieces_(std::move(pieces)),
          chunks_(std::move(chunks)),
          compare_(compare),
          base_(file->data()),
          file_nbytes_(file_nbytes),
          use_(file),
          crcs_(chunks_.size()),
          differs_(compare ? pieces_.size() : 0) {}

    const std::vector<std::uint32_t>& crcs() const noexcept { return crcs_; }
    std::vector<std::int64_t> differing() const {
        std::vector<std::int64_t> found;
        for (std::size_t i = 0; i < differs_.size(); ++i)
            if (differs_[i].load()) found.push_back(static_cast<std::int64_t>(i));
        return found;
    }

private:
    // Not left to the destructor: a worker may still hold the task for a moment after the caller has its result.
    void finished() noexcept override { use_.drop(); }

    void run(std::size_t unit) override {
        const std::uint64_t from = static_cast<std::uint64_t>(chunks_[unit]) * kChunk;
        const std::uint64_t to = std::min<std::uint64_t>(from + kChunk, file_nbytes_);
        std::uint32_t state = crc32c::start(0);
        std::uint64_t at = from;
        for (std::size_t i = first_ending_after(pieces_, from); i < pieces_.size() && pieces_.offset[i] < to; ++i) {
            const std::uint64_t begin = std::max(from, pieces_.offset[i]), end = std::min(to, pieces_.end(i));
            if (end <= begin) continue;
            const void* source = pointer(pieces_.address[i] + (begin - pieces_.offset[i]));
            if (compare_) {
                if (std::memcmp(source, base_ + begin, end - begin) != 0) differs_[i].store(true);
            } else {
                state = kernels_.crc(kernels_.crc(state, base_ + at, begin - at), source, end - begin);
                at = end;
            }
        }
        if (!compare_) crcs_[unit] = crc32c::finish(kernels_.crc(state, base_ + at, to - at));
    }

    const Kernels& kernels_;
    const Pieces pieces_;
    const std::vector<std::int64_t> chunks_;
    const bool compare_;
    const unsigned char* const base_;
    const std::uint64_t file_nbytes_;
    Use use_;
    std::vector<std::uint32_t> crcs_;
    std::vector<std::atomic<bool>> differs_;
};

void check_file(const std::shared_ptr<SharedMemory>& file, std::uint64_t file_nbytes) {
    file->data();  // throws when closed
    if (file_nbytes > file->nbytes()) throw std::invalid_argument("file_nbytes is larger than the shared memory");
}

std::shared_ptr<Audit> run_audit(Pieces pieces, const std::shared_ptr<SharedMemory>& file, std::uint64_t file_nbytes,
                                 std::vector<std::int64_t> chunks, bool compare, unsigned threads) {
    check_file(file, file_nbytes);
    check(pieces, file_nbytes, false);
    const auto n = static_cast<std::int64_t>(ceil_div(file_nbytes, kChunk));
    for (const std::int64_t c : chunks)
        if (c < 0 || c >= n) throw std::invalid_argument("no such chunk: " + std::to_string(c));
    auto task = std::make_shared<Audit>(file, file_nbytes, std::move(pieces), std::move(chunks), compare, threads);
    Task::submit(task);
    task->wait();
    task->rethrow();
    return task;
}

}  // namespace

std::shared_ptr<CopyJob> gather(Pieces pieces, std::shared_ptr<SharedMemory> target, std::uint64_t file_nbytes, bool with_crc,
                                unsigned threads, bool submit) {
    check_file(target, file_nbytes);
    if (!target->writable()) throw std::invalid_argument("the target is mapped read-only");
    check(pieces, file_nbytes, false);
    const auto base = reinterpret_cast<std::uintptr_t>(target->data());
    for (std::size_t i = 0; i < pieces.size(); ++i) {
        const std::uint64_t a = pieces.address[i], n = pieces.nbytes[i];
        if (n != 0 && a < base + file_nbytes && a + n > base && a != base + pieces.offset[i])
            throw std::invalid_argument("piece " + std::to_string(i) + ": lies in the target, but not in its place");
    }
    auto job = std::make_shared<Gather>(std::move(target), file_nbytes, std::move(pieces), with_crc, threads);
    if (submit) Task::submit(job);
    return job;
}

std::shared_ptr<CopyJob> scatter(std::shared_ptr<SharedMemory> source, std::uint64_t file_nbytes, Pieces pieces,
                                 std::vector<std::uint32_t> expected, unsigned threads) {
    check_file(source, file_nbytes);
    check(pieces, file_nbytes, true);
    const auto base = reinterpret_cast<std::uintptr_t>(source->data());
    for (std::size_t i = 0; i < pieces.size(); ++i)
        if (pieces.nbytes[i] != 0 && pieces.address[i] < base + source->nbytes() && pieces.address[i] + pieces.nbytes[i] > base)
            throw std::invalid_argument("piece " + std::to_string(i) + ": target lies in the file itself");
    if (!expected.empty() && expected.size() != ceil_div(file_nbytes, kChunk))
        throw std::invalid_argument("crcs does not have one entry for each chunk");
    auto job = std::make_shared<Scatter>(std::move(source), file_nbytes, std::move(pieces), std::move(expected), threads);
    Task::submit(job);
    return job;
}

std::vector<std::int64_t> audit(Pieces pieces, const std::shared_ptr<SharedMemory>& file, std::uint64_t file_nbytes,
                                std::vector<std::int64_t> chunks, unsigned threads) {
    return run_audit(std::move(pieces), file, file_nbytes, std::move(chunks), true, threads)->differing();
}

std::vector<std::uint32_t> crc_sources(Pieces pieces, const std::shared_ptr<SharedMemory>& file, std::uint64_t file_nbytes,
                                       std::vector<std::int64_t> chunks, unsigned threads) {
    return run_audit(std::move(pieces), file, file_nbytes, std::move(chunks), false, threads)->crcs();
}

}  // namespace memckpt
