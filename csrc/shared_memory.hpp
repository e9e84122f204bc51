// A mapped file whose pages are there: what a slot is made of.
//
// Contract: `create` makes a new file (O_EXCL, O_NOFOLLOW) and reserves every byte, or throws OsError and leaves no file;
// so writing to it cannot end in SIGBUS for lack of space. `open` maps a whole existing regular file. The descriptor is
// closed at once; the mapping alone is owned (through shared_ptr), and unmapped by the destructor or by `retire` and
// `unmap`. A forked child does not inherit it (MADV_DONTFORK), since a long-lived DataLoader worker would otherwise keep
// the pages of removed slots; there `data()` throws.
//
// References: madvise(2), posix_fallocate(3), Linux Documentation/mm/transhuge.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>

namespace memckpt {

class SharedMemory {
public:
    static std::shared_ptr<SharedMemory> create(const std::string& path, std::size_t nbytes, mode_t mode);
    static std::shared_ptr<SharedMemory> open(const std::string& path, bool writable);
    ~SharedMemory() noexcept;
    SharedMemory(const SharedMemory&) = delete;
    SharedMemory& operator=(const SharedMemory&) = delete;

    unsigned char* data() const;  // throws std::runtime_error when closed, or in a forked child
    std::size_t nbytes() const noexcept { return nbytes_; }
    const std::string& path() const noexcept { return path_; }
    bool writable() const noexcept { return writable_; }
    bool closed() const noexcept { return closed_.load(); }

    void populate(unsigned threads);  // page tables filled, so that the first copy meets no page fault
    bool lock() noexcept;             // mlock; false where it is not permitted
    void retire();                    // closed from now on, for everybody; throws InUse while somebody uses it
    void unmap() noexcept;            // after retire; long, so not part of it

    void acquire();           // one more user; throws when closed
    void release() noexcept;  // one less

private:
    SharedMemory(std::string path, void* address, std::size_t nbytes, bool writable) noexcept;

    const std::string path_;
    void* const address_;
    const std::size_t nbytes_;
    const bool writable_;
    const pid_t owner_;
    std::atomic<std::size_t> users_{0};
    std::atomic<bool> closed_{false}, unmapped_{false};
};

// Keeps a memory from being closed while a job works on it.
class Use {
public:
    explicit Use(std::shared_ptr<SharedMemory> memory) : memory_(std::move(memory)) { memory_->acquire(); }
    ~Use() noexcept { drop(); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    void drop() noexcept {
        if (memory_) memory_->release();
        memory_.reset();
    }

private:
    std::shared_ptr<SharedMemory> memory_;
};

}  // namespace memckpt
