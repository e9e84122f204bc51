// Mapped files; see shared_memory.hpp for the contract.
// Build: c++ -std=c++17 -O3 -pthread -c shared_memory.cpp
#include "shared_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "error.hpp"
#include "pool.hpp"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace memckpt {
namespace {

constexpr std::size_t kSlab = std::size_t{64} << 20;  // a signal makes fallocate start again: not with everything

struct Descriptor {
    int fd;
    ~Descriptor() {
        if (fd >= 0) ::close(fd);
    }
};

[[noreturn]] void fail(int code, const char* doing, const std::string& path) {
    throw OsError(code, std::string(doing) + ": " + std::strerror(code), path);
}

int reserve(int fd, std::size_t nbytes) noexcept {
    for (std::size_t at = 0; at < nbytes;) {
        const std::size_t part = std::min(kSlab, nbytes - at);
        const int code = ::posix_fallocate(fd, static_cast<off_t>(at), static_cast<off_t>(part));
        if (code == EINTR) continue;
        if (code != 0) return code;
        at += part;
    }
    return 0;
}

void* map(int fd, std::size_t nbytes, bool writable, const std::string& path) {
    void* address = ::mmap(nullptr, nbytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED) fail(errno, "cannot map", path);
    ::madvise(address, nbytes, MADV_DONTFORK);
    ::madvise(address, nbytes, MADV_HUGEPAGE);  // advice: a kernel without huge pages for tmpfs says no, and that is fine
    return address;
}

class Populate final : public Task {
public:
    Populate(unsigned char* base, std::size_t nbytes, bool writable, unsigned threads)
        : Task((nbytes + kUnit - 1) / kUnit, threads), base_(base), nbytes_(nbytes), writable_(writable) {}

private:
    static constexpr std::size_t kUnit = std::size_t{16} << 20;

    void run(std::size_t unit) override {
        unsigned char* from = base_ + unit * kUnit;
        const std::size_t n = std::min(kUnit, nbytes_ - unit * kUnit);
        int code;
        do {
            code = ::madvise(from, n, writable_ ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) == 0 ? 0 : errno;
        } while (code == EINTR || code == EAGAIN);
        if (code == EINVAL) {  // before Linux 5.14: touch by hand; the space is reserved already
            const std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
            for (std::size_t at = 0; at < n; at += page) {
                if (writable_)
                    __atomic_fetch_or(from + at, 0, __ATOMIC_RELAXED);  // a write that changes nothing, even in a race
                else
                    (void)__atomic_load_n(from + at, __ATOMIC_RELAXED);
            }
        } else if (code != 0) {
            throw std::runtime_error(std::string("cannot populate memory: ") + std::strerror(code));
        }
    }

    unsigned char* base_;
    std::size_t nbytes_;
    bool writable_;
};

}  // namespace

SharedMemory::SharedMemory(std::string path, void* address, std::size_t nbytes, bool writable) noexcept
    : path_(std::move(path)), address_(address), nbytes_(nbytes), writable_(writable), owner_(::getpid()) {}

std::shared_ptr<SharedMemory> SharedMemory::create(const std::string& path, std::size_t nbytes, mode_t mode) {
    if (nbytes == 0) throw std::invalid_argument("shared memory needs at least one byte");
    if (nbytes > static_cast<std::size_t>(PTRDIFF_MAX)) throw std::invalid_argument("shared memory of impossible size");
    Descriptor file{::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode)};
    if (file.fd < 0) fail(errno, "cannot create", path);
    try {
        if (::fchmod(file.fd, mode) != 0) fail(errno, "cannot set the mode", path);
        if (const int code = reserve(file.fd, nbytes); code != 0) fail(code, "cannot reserve memory", path);
        void* address = map(file.fd, nbytes, true, path);
        return std::shared_ptr<SharedMemory>(new SharedMemory(path, address, nbytes, true));
    } catch (...) {
        ::unlink(path.c_str());
        throw;
    }
}

std::shared_ptr<SharedMemory> SharedMemory::open(const std::string& path, bool writable) {
    Descriptor file{::open(path.c_str(), (writable ? O_RDWR : O_RDONLY) | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK)};
    if (file.fd < 0) fail(errno, "cannot open", path);
    struct stat status {};
    if (::fstat(file.fd, &status) != 0) fail(errno, "cannot stat", path);
    if (!S_ISREG(status.st_mode)) fail(EINVAL, "not a regular file", path);
    const auto nbytes = static_cast<std::size_t>(status.st_size);
    if (nbytes == 0) return std::shared_ptr<SharedMemory>(new SharedMemory(path, nullptr, 0, writable));
    const bool whole = static_cast<std::size_t>(status.st_blocks) * 512 >= nbytes;
    if (writable && !whole) {  // asking for what is there already walks every page all the same
        if (const int code = reserve(file.fd, nbytes); code != 0) fail(code, "cannot reserve memory", path);
    }
    void* address = map(file.fd, nbytes, writable, path);
    auto memory = std::shared_ptr<SharedMemory>(new SharedMemory(path, address, nbytes, writable));
    // A hole in a tmpfs file takes a page when it is read, and a full tmpfs would answer with SIGBUS: find out here.
    if (!writable && !whole &&
        ::madvise(address, nbytes, MADV_POPULATE_READ) != 0 && errno == EFAULT)
        fail(ENOSPC, "cannot read a file with holes", path);
    return memory;
}

SharedMemory::~SharedMemory() noexcept { unmap(); }

unsigned char* SharedMemory::data() const {
    if (closed_.load()) throw std::runtime_error("shared memory is closed: " + path_);
    if (owner_ != ::getpid())
        throw std::runtime_error("shared memory is not inherited by a forked process, open it again: " + path_);
    return static_cast<unsigned char*>(address_);
}

void SharedMemory::populate(unsigned threads) {
    if (nbytes_ == 0) return;
    auto task = std::make_shared<Populate>(data(), nbytes_, writable_, threads);
    Task::submit(task);
    task->wait();
    task->rethrow();
}

bool SharedMemory::lock() noexcept {
    return address_ != nullptr && !closed_.load() && owner_ == ::getpid() && ::mlock(address_, nbytes_) == 0;
}

void SharedMemory::acquire() {
    data();
    users_.fetch_add(1);
}

void SharedMemory::release() noexcept { users_.fetch_sub(1); }

void SharedMemory::retire() {
    // Like acquire, called with the GIL held, so that no user can slip in between the two lines.
    if (users_.load() != 0) throw InUse("shared memory is in use by a buffer or a copy job: " + path_);
    closed_.store(true);
}

void SharedMemory::unmap() noexcept {
    // In a forked child the addresses may belong to something else by now.
    if (address_ != nullptr && !unmapped_.exchange(true) && owner_ == ::getpid()) ::munmap(address_, nbytes_);
}

}  // namespace memckpt
