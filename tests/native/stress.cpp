// Unit and stress program of the native engine, without Python, to be built with sanitizers (tests/test_native_sanitize.py).
//
//   c++ -std=c++17 -O1 -g -fsanitize=address,undefined -pthread -Icsrc tests/native/stress.cpp csrc/[!b]*.cpp -o stress
//   ./stress DIRECTORY SEED ROUNDS
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "copy.hpp"
#include "crc32c.hpp"
#include "error.hpp"
#include "plain_copy.hpp"

using namespace memckpt;

namespace {

#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);      \
            std::abort();                                                             \
        }                                                                             \
    } while (false)

using Random = std::mt19937_64;
using Block = std::vector<unsigned char>;

std::size_t below(Random& random, std::size_t n) { return static_cast<std::size_t>(random() % n); }

Block noise(Random& random, std::size_t n) {
    Block block(n);
    for (auto& byte : block) byte = static_cast<unsigned char>(random());
    return block;
}

std::uint32_t crc_of(const void* data, std::size_t n) {
    return crc32c::finish(crc32c::update_scalar(crc32c::start(0), data, n));
}

// Every path against the scalar one; each block is exactly as large as what is read, so that an overrun is seen.
void check_kernels(Random& random) {
    CHECK(crc_of("123456789", 9) == 0xE3069283u);
    for (const auto& name : runnable_kernels()) {
        select_kernels(name);
        for (int round = 0; round < 300; ++round) {
            const std::size_t n = below(random, round < 200 ? 700 : 20000), shift = below(random, 64);
            const Block source = noise(random, n);
            Block target(shift + n, 0);
            const std::uint32_t state = crc32c::start(static_cast<std::uint32_t>(random()));
            const std::uint32_t expected = crc32c::update_scalar(state, source.data(), n);
            CHECK(kernels().crc(state, source.data(), n) == expected);
            CHECK(kernels().copy_crc(state, target.data() + shift, source.data(), n) == expected);
            CHECK(n == 0 || std::memcmp(target.data() + shift, source.data(), n) == 0);
            std::fill(target.begin(), target.end(), 0);
            kernels().copy(target.data() + shift, source.data(), n);
            CHECK(n == 0 || std::memcmp(target.data() + shift, source.data(), n) == 0);
            const std::size_t cut = n == 0 ? 0 : below(random, n);
            CHECK(crc32c::combine(crc_of(source.data(), cut), crc_of(source.data() + cut, n - cut), n - cut) ==
                  crc_of(source.data(), n));
        }
    }
}

struct Case {
    Pieces pieces;
    std::vector<Block> blocks;
};

Case make_case(Random& random, std::size_t file_nbytes, unsigned char* base) {
    Case c;
    for (std::size_t at = below(random, 5000); at < file_nbytes;) {
        const std::size_t sizes[] = {0, 1, 3, 64, 1000, 5000, 9000, 70000, 3000000};
        const std::size_t n = std::min(sizes[below(random, 9)], file_nbytes - at);
        c.blocks.push_back(noise(random, n));
        const bool in_place = base != nullptr && below(random, 8) == 0;
        if (in_place && n != 0) std::memcpy(c.blocks.back().data(), base + at, n);
        c.pieces.address.push_back(reinterpret_cast<std::uintptr_t>(in_place ? base + at : c.blocks.back().data()));
        c.pieces.nbytes.push_back(n);
        c.pieces.offset.push_back(at);
        at += n + (below(random, 4) == 0 ? below(random, 100) : 0);
    }
    return c;
}

void check_jobs(Random& random, const std::string& path, int rounds) {
    for (int round = 0; round < rounds; ++round) {
        const std::size_t file_nbytes = 1 + below(random, 3 * kChunk);
        auto memory = SharedMemory::create(path, file_nbytes + below(random, 5000), 0600);
        ::unlink(path.c_str());
        memory->populate(2);
        const Block before = noise(random, file_nbytes);
        std::memcpy(memory->data(), before.data(), file_nbytes);
        Case c = make_case(random, file_nbytes, memory->data());
        Block expected = before;
        for (std::size_t i = 0; i < c.pieces.size(); ++i)
            if (c.pieces.nbytes[i] != 0) std::memcpy(&expected[c.pieces.offset[i]], c.blocks[i].data(), c.pieces.nbytes[i]);

        auto job = gather(c.pieces, memory, file_nbytes, true, 1 + static_cast<unsigned>(below(random, 4)));
        for (std::size_t seen = 0; !job->done();) {
            const std::size_t mark = job->watermark();
            CHECK(mark >= seen);
            if (mark > 0) {
                const std::size_t from = (mark - 1) * kChunk, n = std::min(kChunk, file_nbytes - from);
                CHECK(std::memcmp(memory->data() + from, &expected[from], n) == 0);
            }
            seen = mark;
            if (below(random, 2) == 0) job->wait_until(Clock::now() + std::chrono::microseconds(200));
        }
        CHECK(job->watermark() == job->chunks());
        CHECK(std::memcmp(memory->data(), expected.data(), file_nbytes) == 0);
        for (std::size_t k = 0; k < job->chunks(); ++k)
            CHECK(job->crcs()[k] == crc_of(&expected[k * kChunk], std::min(kChunk, file_nbytes - k * kChunk)));

        std::vector<std::int64_t> all;
        for (std::size_t k = 0; k < job->chunks(); ++k) all.push_back(static_cast<std::int64_t>(k));
        CHECK(audit(c.pieces, memory, file_nbytes, all, 2).empty());
        CHECK(crc_sources(c.pieces, memory, file_nbytes, all, 2) == job->crcs());

        // Out again, with one byte spoilt: the right bytes, and the right chunk blamed.
        Case out = make_case(random, file_nbytes, nullptr);
        const std::size_t spoilt = below(random, file_nbytes);
        memory->data()[spoilt] ^= 1;
        expected[spoilt] ^= 1;
        auto back = scatter(memory, file_nbytes, out.pieces, job->crcs(), 2);
        back->wait();
        CHECK(back->bad_chunks() == std::vector<std::int64_t>{static_cast<std::int64_t>(spoilt / kChunk)});
        for (std::size_t i = 0; i < out.pieces.size(); ++i)
            CHECK(out.pieces.nbytes[i] == 0 ||
                  std::memcmp(out.blocks[i].data(), &expected[out.pieces.offset[i]], out.pieces.nbytes[i]) == 0);
        memory->retire();
        memory->unmap();
    }
}

void check_limits(const std::string& path) {
    auto memory = SharedMemory::create(path, 1 << 20, 0600);
    ::unlink(path.c_str());
    Block block(1 << 20, 7);
    for (const auto mode : {CopyMode::memcpy, CopyMode::stream, CopyMode::string}) {
        std::memset(memory->data(), 0, 1 << 20);
        plain_copy(memory->data(), block.data(), block.size(), mode, 3);
        CHECK(std::memcmp(memory->data(), block.data(), block.size()) == 0);
    }
    const auto refused = [&](Pieces pieces) {
        try {
            gather(std::move(pieces), memory, 1 << 20, true, 2);
        } catch (const std::invalid_argument&) {
            return true;
        }
        return false;
    };
    const auto address = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(block.data()));
    CHECK(refused({{0}, {1}, {0}}));
    CHECK(refused({{address}, {2}, {(1 << 20) - 1}}));
    CHECK(refused({{address}, {~0ull}, {1}}));
    CHECK(refused({{address, address}, {2, 2}, {0, 1}}));
    CHECK(refused({{address, address}, {1, 1}, {5, 1}}));
    CHECK(refused({{reinterpret_cast<std::uintptr_t>(memory->data()) + 1}, {8}, {0}}));
    CHECK(!refused({{0}, {0}, {0}}));
}

void check_fork(Random& random, const std::string& path) {
    const pid_t child = ::fork();
    CHECK(child >= 0);
    if (child == 0) {
        if (pool_threads() != 0) ::_exit(1);
        check_jobs(random, path, 1);
        shutdown_pool();
        ::_exit(0);
    }
    int status = 0;
    CHECK(::waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace

int main(int argc, char** argv) {
    const std::string directory = argc > 1 ? argv[1] : "/dev/shm";
    const auto seed = static_cast<std::uint64_t>(argc > 2 ? std::atoll(argv[2]) : 1);
    const int rounds = argc > 3 ? std::atoi(argv[3]) : 3;
    const std::string path = directory + "/memckpt-stress-" + std::to_string(::getpid()) + "-";
    Random random(seed);
    check_kernels(random);
    check_limits(path + "limits");
    for (const auto& name : runnable_kernels()) {
        select_kernels(name);
        check_jobs(random, path + "one", 1);
    }
    std::vector<std::thread> threads;  // several jobs at once share the pool
    for (int t = 0; t < 3; ++t)
        threads.emplace_back([&, t] {
            Random own(seed + 1 + static_cast<std::uint64_t>(t));
            check_jobs(own, path + std::to_string(t), rounds);
        });
    shutdown_pool();  // under their feet
    for (auto& t : threads) t.join();
#ifndef __SANITIZE_THREAD__  // it does not follow a child of a program with threads
    check_fork(random, path + "fork");
#endif
    check_jobs(random, path + "last", 1);
    CHECK(pool_threads() > 0);
    shutdown_pool();
    CHECK(pool_threads() == 0);
    std::puts("ok");
    return 0;
}
