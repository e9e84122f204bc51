// Thread pool; see pool.hpp for the contract.
// Build: c++ -std=c++17 -O3 -pthread -c pool.cpp
#include "pool.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

namespace memckpt {

class Pool {
public:
    void submit(const std::shared_ptr<Task>& task) {
        std::unique_lock<std::mutex> lock(mutex_);
        stopped_.wait(lock, [this] { return !stopping_; });
        const std::size_t wanted = std::min<std::size_t>(task->threads_, task->units_);
        try {
            while (threads_.size() < wanted) threads_.push_back(spawn());
        } catch (const std::system_error&) {  // no more threads for this process: fewer will do, none will not
            if (threads_.empty()) throw;
        }
        queue_.push_back(task);
        wake_.notify_all();
    }

    void stop() {
        std::lock_guard<std::mutex> alone(stop_mutex_);
        std::vector<std::thread> threads;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
            threads.swap(threads_);
            wake_.notify_all();
        }
        for (auto& t : threads) t.join();
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = false;
        stopped_.notify_all();
    }

    std::size_t size() {
        std::lock_guard<std::mutex> lock(mutex_);
        return threads_.size();
    }

private:
    std::thread spawn() {
        // Signals belong to the program's own threads (Python's handlers, MPI's), never to ours.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        std::thread thread;
        try {
            thread = std::thread([this] { work(); });
        } catch (...) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            throw;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        pthread_setname_np(thread.native_handle(), "memckpt-copy");
        // A woken copy must not take the processor from the training thread that has just submitted it: batch threads
        // get the same share of time, but preempt nobody when they wake. Where that is refused, nothing is lost.
        const sched_param none{};
        pthread_setschedparam(thread.native_handle(), SCHED_BATCH, &none);
        return thread;
    }

    std::shared_ptr<Task> take() noexcept {
        while (!queue_.empty() && queue_.front()->exhausted()) queue_.pop_front();
        for (auto& task : queue_)
            if (!task->exhausted() && task->enter()) return task;
        return nullptr;
    }

    void work() noexcept {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            std::shared_ptr<Task> task = take();
            if (!task) {
                if (stopping_) return;
                wake_.wait(lock);
                continue;
            }
            lock.unlock();
            while (task->run_one()) {
            }
            task->leave();
            task.reset();  // may unmap memory: not under the lock
            lock.lock();
        }
    }

    std::mutex mutex_, stop_mutex_;
    std::condition_variable wake_, stopped_;
    std::deque<std::shared_ptr<Task>> queue_;
    std::vector<std::thread> threads_;
    bool stopping_ = false;
};

namespace {

constexpr const char* kForeign = "this copy job belongs to the parent process and does not run here";

struct Holder {
    pid_t owner;
    Pool pool;
};

std::atomic<Holder*> g_holder{nullptr};
std::mutex g_mutex;  // guards the making of the pool; see the fork handlers below

// fork() is called with g_mutex held and released on both sides, so that the child never inherits it locked.
[[maybe_unused]] const int g_registered = pthread_atfork([] { g_mutex.lock(); }, [] { g_mutex.unlock(); },
                                                         [] { g_mutex.unlock(); });

Pool& pool() {
    const pid_t here = getpid();
    std::lock_guard<std::mutex> lock(g_mutex);
    Holder* holder = g_holder.load();
    if (holder == nullptr || holder->owner != here) {
        // Never deleted: threads may still run while the process exits, and a forked child cannot safely destroy it.
        holder = new Holder{here, {}};
        g_holder.store(holder);
    }
    return holder->pool;
}

}  // namespace

void shutdown_pool() {
    Holder* holder = g_holder.load();
    if (holder != nullptr && holder->owner == getpid()) holder->pool.stop();
}

std::size_t pool_threads() noexcept {
    Holder* holder = g_holder.load();
    return holder != nullptr && holder->owner == getpid() ? holder->pool.size() : 0;
}

Task::Task(std::size_t units, unsigned threads) : units_(units), threads_(threads), owner_(getpid()), left_(units) {}

bool Task::owned_here() const noexcept { return owner_ == getpid(); }

void Task::submit(const std::shared_ptr<Task>& task) {
    if (!task->owned_here()) throw std::runtime_error(kForeign);
    if (task->submitted_.exchange(true, std::memory_order_acq_rel)) return;
    if (task->units_ == 0) {
        task->complete();
        return;
    }
    pool().submit(task);
}

bool Task::enter() noexcept {
    unsigned inside = inside_.load(std::memory_order_relaxed);
    while (inside < threads_)
        if (inside_.compare_exchange_weak(inside, inside + 1)) return true;
    return false;
}

void Task::leave() noexcept { inside_.fetch_sub(1); }

bool Task::run_one() noexcept {
    const std::size_t unit = next_.fetch_add(1, std::memory_order_relaxed);
    if (unit >= units_) {
        next_.store(units_, std::memory_order_relaxed);  // so that it cannot wrap, however often we are asked
        return false;
    }
    if (!failed_.load(std::memory_order_relaxed)) {
        try {
            run(unit);
        } catch (...) {
            std::lock_guard<std::mutex> lock(mutex_);
            if (!error_) error_ = std::current_exception();
            failed_.store(true);
        }
    }
    if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) complete();
    return true;
}

void Task::complete() noexcept {
    finished();
    std::lock_guard<std::mutex> lock(mutex_);
    done_.store(true, std::memory_order_release);
    changed_.notify_all();
}

bool Task::wait_until(Clock::time_point deadline) {
    if (done()) return true;
    if (!owned_here()) throw std::runtime_error(kForeign);
    if (enter()) {
        while (Clock::now() < deadline && run_one()) {
        }
        leave();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_until(lock, deadline, [this] { return done(); });
}

void Task::wait() {
    while (!wait_until(Clock::now() + std::chrono::hours(1))) {
    }
}

void Task::wait_noexcept() noexcept {
    if (!owned_here()) return;
    try {
        wait();
    } catch (...) {  // a lock that cannot be taken: better a leak than a copy into freed memory
        std::terminate();
    }
}

void Task::rethrow() const {
    std::lock_guard<std::mutex> lock(mutex_);
    if (error_) std::rethrow_exception(error_);
}

}  // namespace memckpt
