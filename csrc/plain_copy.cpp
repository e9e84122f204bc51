// Limit copies for the benchmarks; see plain_copy.hpp for the contract.
// Build: c++ -std=c++17 -O3 -pthread -c plain_copy.cpp
#include "plain_copy.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "kernels.hpp"
#include "pool.hpp"

namespace memckpt {
namespace {

class PlainCopy final : public Task {
public:
    PlainCopy(void* target, const void* source, std::size_t nbytes, CopyMode mode, unsigned threads)
        : Task(threads, threads),
          target_(static_cast<char*>(target)),
          source_(static_cast<const char*>(source)),
          nbytes_(nbytes),
          part_(nbytes / threads / 4096 * 4096 + 4096),
          mode_(mode) {}

private:
    void run(std::size_t unit) override {
        const std::size_t from = std::min(nbytes_, unit * part_);
        std::size_t n = std::min(nbytes_ - from, part_);
        void* target = target_ + from;
        const void* source = source_ + from;
        switch (mode_) {
            case CopyMode::memcpy:
                std::memcpy(target, source, n);
                break;
            case CopyMode::stream:
                best_kernels().copy(target, source, n);
                break;
            case CopyMode::string:
                asm volatile("rep movsb" : "+D"(target), "+S"(source), "+c"(n) : : "memory");
                break;
        }
        store_fence();
    }

    char* target_;
    const char* source_;
    std::size_t nbytes_, part_;
    CopyMode mode_;
};

}  // namespace

CopyMode copy_mode(const std::string& name) {
    if (name == "memcpy") return CopyMode::memcpy;
    if (name == "stream") return CopyMode::stream;
    if (name == "string") return CopyMode::string;
    throw std::invalid_argument("no such copy mode: " + name + " (memcpy, stream, string)");
}

void plain_copy(void* target, const void* source, std::size_t nbytes, CopyMode mode, unsigned threads) {
    auto task = std::make_shared<PlainCopy>(target, source, nbytes, mode, threads);
    Task::submit(task);
    task->wait();
}

}  // namespace memckpt
