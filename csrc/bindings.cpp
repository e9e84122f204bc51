// Python's face of the native engine: the only file here that includes Python.
//
// Contract: every argument is checked while the GIL is held (a wrong one is a ValueError or TypeError, never a crash), then
// the GIL is released for whatever copies, checksums, waits or enters the kernel. Arrays are taken over by value, so the
// caller may change them afterwards. A CopyJob handle keeps its `keep` object and its memory until the copy is finished;
// dropping the handle waits for it.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <optional>

#include "copy.hpp"
#include "crc32c.hpp"
#include "error.hpp"
#include "plain_copy.hpp"

namespace py = pybind11;
using namespace memckpt;
using namespace pybind11::literals;

namespace {

constexpr std::int64_t kMaxThreads = 256;

unsigned thread_count(std::int64_t threads) {
    if (threads < 1 || threads > kMaxThreads) throw std::invalid_argument("threads must be between 1 and 256");
    return static_cast<unsigned>(threads);
}

template <class T>
std::vector<T> vector_of(const py::handle& object, const char* name) {
    if (!py::isinstance<py::array>(object)) throw py::type_error(std::string(name) + " is not a NumPy array");
    const auto array = py::reinterpret_borrow<py::array>(object);
    if (!py::isinstance<py::array_t<T>>(array))
        throw std::invalid_argument(std::string(name) + " has dtype " + std::string(py::str(array.dtype())) + ", needed is " +
                                    std::string(py::str(py::dtype::of<T>())));
    if (array.ndim() != 1) throw std::invalid_argument(std::string(name) + " is not one-dimensional");
    if (!(array.flags() & py::array::c_style)) throw std::invalid_argument(std::string(name) + " is not contiguous");
    const auto* data = static_cast<const T*>(array.data());
    return std::vector<T>(data, data + array.size());
}

template <class T>
py::array_t<T> array_of(const std::vector<T>& values) {
    return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

Pieces pieces_of(const py::handle& addresses, const py::handle& nbytes, const py::handle& offsets, const char* name) {
    return Pieces{vector_of<std::uint64_t>(addresses, name), vector_of<std::uint64_t>(nbytes, "nbytes"),
                  vector_of<std::uint64_t>(offsets, "offsets")};
}

std::vector<std::int64_t> chunks_of(const py::handle& chunks, std::uint64_t file_nbytes) {
    if (!chunks.is_none()) return vector_of<std::int64_t>(chunks, "chunks");
    std::vector<std::int64_t> all((file_nbytes + kChunk - 1) / kChunk);
    for (std::size_t c = 0; c < all.size(); ++c) all[c] = static_cast<std::int64_t>(c);
    return all;
}

// A contiguous buffer, read-only is enough.
class Bytes {
public:
    explicit Bytes(const py::handle& object) {
        if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) {
            if (!PyErr_ExceptionMatches(PyExc_BufferError)) throw py::error_already_set();
            PyErr_Clear();
            throw std::invalid_argument("buffer is not contiguous");
        }
    }
    ~Bytes() { PyBuffer_Release(&view_); }
    Bytes(const Bytes&) = delete;
    Bytes& operator=(const Bytes&) = delete;
    const void* data() const { return view_.buf; }
    std::size_t size() const { return static_cast<std::size_t>(view_.len); }

private:
    Py_buffer view_;
};

// ---------------------------------------------------------------------------------------------------- copy jobs

class JobHandle {
public:
    JobHandle(std::shared_ptr<CopyJob> job, py::object keep) : job_(std::move(job)), keep_(std::move(keep)) {}
    ~JobHandle() noexcept {
        if (!job_ || !job_->submitted() || job_->done()) return;
        const py::gil_scoped_release release;  // `keep` is dropped after this, with the GIL held again
        job_->wait_noexcept();
    }
    JobHandle(const JobHandle&) = delete;
    JobHandle& operator=(const JobHandle&) = delete;

    void start() { Task::submit(job_); }
    std::size_t watermark() const noexcept { return job_->watermark(); }

    bool done() {
        if (!job_->done()) return false;
        keep_ = py::none();
        return true;
    }

    bool wait(std::optional<double> timeout_s) {
        if (timeout_s && !(*timeout_s >= 0)) throw std::invalid_argument("timeout_s is negative");
        start();
        // Capped, since a deadline beyond the clock's range would lie in the past.
        const auto patience = std::chrono::duration<double>(timeout_s ? std::min(*timeout_s, 1e8) : 1e8);
        const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(patience);
        for (bool first = true; !job_->done(); first = false) {
            if (!first && Clock::now() >= deadline) return false;
            {
                const py::gil_scoped_release release;
                job_->wait_until(std::min(deadline, Clock::now() + std::chrono::milliseconds(50)));
            }
            if (PyErr_CheckSignals() != 0) throw py::error_already_set();  // Ctrl-C
        }
        job_->rethrow();
        return done();
    }

    py::array_t<std::uint32_t> crcs() {
        settled();
        if (!job_->has_crcs()) throw std::runtime_error("this job was started with crc=False");
        return array_of(job_->crcs());
    }

    py::array_t<std::int64_t> bad_chunks() {
        settled();
        return array_of(job_->bad_chunks());
    }

private:
    void settled() {
        if (!done()) throw std::runtime_error("the copy job is not done yet");
        job_->rethrow();
    }

    std::shared_ptr<CopyJob> job_;
    py::object keep_;
};

// --------------------------------------------------------------------------------------------- buffer protocol
// By hand, not by py::buffer_protocol: that one has no hook for the release of a buffer, and close() needs to know.

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
    try {
        auto memory = py::cast<std::shared_ptr<SharedMemory>>(py::handle(self));
        if ((flags & PyBUF_WRITABLE) && !memory->writable()) {
            PyErr_SetString(PyExc_BufferError, "shared memory is mapped read-only");
            return -1;
        }
        memory->acquire();
        if (PyBuffer_FillInfo(view, self, memory->data(), static_cast<Py_ssize_t>(memory->nbytes()), !memory->writable(),
                              flags) != 0) {
            memory->release();
            return -1;
        }
        return 0;
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_BufferError, error.what());
        return -1;
    }
}

void release_buffer(PyObject* self, Py_buffer*) {
    try {
        py::cast<std::shared_ptr<SharedMemory>>(py::handle(self))->release();
    } catch (...) {
    }
}

// ------------------------------------------------------------------------------------------------ first_change

// With tens of thousands of tensors the time goes into cache misses, one after the other: method, tensor, what the tensor
// points to. So they are asked for some calls ahead. A prefetch never faults, whatever the address.
constexpr std::size_t kLookAhead = 8;

// Not __builtin_prefetch: GCC takes a function that does nothing else for one without effect, and drops the call.
inline void prefetch(const void* p) { asm volatile("prefetcht0 (%0)" : : "r"(p)); }

void prefetch_method(const py::list& methods, std::size_t i) {
    prefetch(PyList_GET_ITEM(methods.ptr(), static_cast<Py_ssize_t>(i)));
}

void prefetch_owner(const py::list& methods, std::size_t i) {
    PyObject* method = PyList_GET_ITEM(methods.ptr(), static_cast<Py_ssize_t>(i));
    if (PyCFunction_CheckExact(method)) prefetch(PyCFunction_GET_SELF(method));
}

void prefetch_body(const py::list& methods, std::size_t i) {
    PyObject* method = PyList_GET_ITEM(methods.ptr(), static_cast<Py_ssize_t>(i));
    if (!PyCFunction_CheckExact(method)) return;
    PyObject* self = PyCFunction_GET_SELF(method);
    if (self == nullptr || Py_TYPE(self)->tp_basicsize < static_cast<Py_ssize_t>(sizeof(PyObject) + 2 * sizeof(void*))) return;
    void* fields[2];
    std::memcpy(fields, reinterpret_cast<const char*>(self) + sizeof(PyObject), sizeof fields);
    for (void* field : fields)
        for (std::size_t k = 0; k < 192; k += 64) prefetch(static_cast<const char*>(field) + k);
}

std::int64_t first_change(const py::list& address_methods, const py::list& size_methods, const py::handle& addresses,
                          const py::handle& sizes) {
    const auto a = vector_of<std::uint64_t>(addresses, "addresses"), s = vector_of<std::uint64_t>(sizes, "sizes");
    const auto differs = [](const py::list& methods, std::size_t i, std::uint64_t expected) {
        // The call may run Python code that changes the list: take a reference, and look at the length each time.
        const std::size_t n = methods.size();
        if (i >= n) throw std::invalid_argument("the list of methods changed while it was read");
        if (i + 3 * kLookAhead < n) {
            prefetch_method(methods, i + 3 * kLookAhead);
            prefetch_owner(methods, i + 2 * kLookAhead);
            prefetch_body(methods, i + kLookAhead);
        }
        const auto method = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(methods.ptr(), static_cast<Py_ssize_t>(i)));
        const auto result = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(method.ptr()));
        if (!result) throw py::error_already_set();
        const unsigned long long value = PyLong_AsUnsignedLongLong(result.ptr());
        if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred()) throw py::error_already_set();
        return value != expected;
    };
    if (address_methods.size() != a.size() || size_methods.size() != s.size() || a.size() != s.size())
        throw std::invalid_argument("methods, addresses and sizes differ in length");
    for (std::size_t i = 0; i < a.size(); ++i)
        if (differs(address_methods, i, a[i]) || differs(size_methods, i, s[i])) return static_cast<std::int64_t>(i);
    return -1;
}

using Memory = std::shared_ptr<SharedMemory>;

// What reads chunks of live memory against those of a file, and waits for its end.
template <typename T>
auto reading(std::vector<T> (*run)(Pieces, const Memory&, std::uint64_t, std::vector<std::int64_t>, unsigned)) {
    return [run](const py::object& sources, const py::object& nbytes, const py::object& offsets, const Memory& file,
                 std::uint64_t file_nbytes, const py::object& chunks, std::int64_t threads) {
        auto pieces = pieces_of(sources, nbytes, offsets, "sources");
        if (file_nbytes > file->nbytes()) throw std::invalid_argument("file_nbytes is larger than the shared memory");
        auto wanted = chunks_of(chunks, file_nbytes);
        const unsigned n = thread_count(threads);
        std::vector<T> found;
        {
            Use use(file);
            const py::gil_scoped_release release;
            found = run(std::move(pieces), file, file_nbytes, std::move(wanted), n);
        }
        return array_of(found);
    };
}

}  // namespace

PYBIND11_MODULE(_native, m) {
    m.doc() = "Copy, checksum and shared memory; sees addresses and sizes, no tensors.";
    m.attr("CHUNK_BYTES") = kChunk;

    py::register_exception_translator([](std::exception_ptr p) {
        try {
            if (p) std::rethrow_exception(p);
        } catch (const OsError& error) {
            const py::object value = py::reinterpret_borrow<py::object>(PyExc_OSError)(error.code, error.what(), error.path);
            PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())), value.ptr());
        } catch (const InUse& error) {
            PyErr_SetString(PyExc_BufferError, error.what());
        }
    });

    kernels();  // a MEMCKPT_CPU that cannot be obeyed is an error of the import, not of the first save

    py::class_<SharedMemory, std::shared_ptr<SharedMemory>>(
        m, "SharedMemory", py::custom_type_setup([](PyHeapTypeObject* type) {
            type->ht_type.tp_as_buffer = &type->as_buffer;
            type->as_buffer.bf_getbuffer = get_buffer;
            type->as_buffer.bf_releasebuffer = release_buffer;
        }))
        .def_static(
            "create",
            [](const std::string& path, std::int64_t nbytes, unsigned mode) {
                if (nbytes <= 0) throw std::invalid_argument("nbytes must be positive");
                if (path.find('\0') != std::string::npos) throw std::invalid_argument("path holds a null byte");
                const py::gil_scoped_release release;
                return SharedMemory::create(path, static_cast<std::size_t>(nbytes), mode);
            },
            "path"_a, "nbytes"_a, py::kw_only(), "mode"_a = 0600)
        .def_static(
            "open",
            [](const std::string& path, bool writable) {
                if (path.find('\0') != std::string::npos) throw std::invalid_argument("path holds a null byte");
                const py::gil_scoped_release release;
                return SharedMemory::open(path, writable);
            },
            "path"_a, py::kw_only(), "writable"_a)
        .def_property_readonly("address",
                               [](const SharedMemory& self) { return reinterpret_cast<std::uintptr_t>(self.data()); })
        .def_property_readonly("nbytes", &SharedMemory::nbytes)
        .def_property_readonly("path", &SharedMemory::path)
        .def_property_readonly("writable", &SharedMemory::writable)
        .def_property_readonly("closed", &SharedMemory::closed)
        .def(
            "populate",
            [](const std::shared_ptr<SharedMemory>& self, std::int64_t threads) {
                const unsigned n = thread_count(threads);
                Use use(self);
                const py::gil_scoped_release release;
                self->populate(n);
            },
            "threads"_a = 2)
        .def("lock",
             [](const std::shared_ptr<SharedMemory>& self) {
                 Use use(self);
                 const py::gil_scoped_release release;
                 return self->lock();
             })
        .def("close",
             [](const std::shared_ptr<SharedMemory>& self) {
                 self->retire();
                 const py::gil_scoped_release release;
                 self->unmap();
             })
        .def("__len__", &SharedMemory::nbytes)
        .def("__repr__", [](const SharedMemory& self) {
            return "<SharedMemory " + self.path() + ", " + std::to_string(self.nbytes()) + " bytes" +
                   (self.closed() ? ", closed>" : ">");
        });

    py::class_<JobHandle>(m, "CopyJob")
        .def_property_readonly("watermark", &JobHandle::watermark)
        .def("start", &JobHandle::start)
        .def("done", &JobHandle::done)
        .def("wait", &JobHandle::wait, "timeout_s"_a = py::none())
        .def("crcs", &JobHandle::crcs)
        .def("bad_chunks", &JobHandle::bad_chunks);


    m.def(
        "gather",
        [](const py::object& sources, const py::object& nbytes, const py::object& offsets, Memory target,
           std::uint64_t file_nbytes, bool crc, std::int64_t threads, py::object keep, bool start) {
            auto job = gather(pieces_of(sources, nbytes, offsets, "sources"), std::move(target), file_nbytes, crc,
                              thread_count(threads), start);
            return std::make_unique<JobHandle>(std::move(job), std::move(keep));
        },
        "sources"_a, "nbytes"_a, "offsets"_a, py::arg("target").none(false), "file_nbytes"_a, py::kw_only(), "crc"_a = true,
        "threads"_a = 2, "keep"_a = py::none(), "start"_a = true);

    m.def(
        "scatter",
        [](Memory source, std::uint64_t file_nbytes, const py::object& targets, const py::object& nbytes,
           const py::object& offsets, const py::object& crcs, std::int64_t threads, py::object keep) {
            std::vector<std::uint32_t> expected;
            if (!crcs.is_none()) {
                expected = vector_of<std::uint32_t>(crcs, "crcs");
                if (expected.size() != (file_nbytes + kChunk - 1) / kChunk)
                    throw std::invalid_argument("crcs does not have one entry for each chunk");
            }
            auto job = scatter(std::move(source), file_nbytes, pieces_of(targets, nbytes, offsets, "targets"),
                               std::move(expected), thread_count(threads));
            return std::make_unique<JobHandle>(std::move(job), std::move(keep));
        },
        py::arg("source").none(false), "file_nbytes"_a, "targets"_a, "nbytes"_a, "offsets"_a, py::kw_only(), "crcs"_a,
        "threads"_a = 2, "keep"_a = py::none());

    m.def("audit", reading<std::int64_t>(audit), "sources"_a, "nbytes"_a, "offsets"_a, py::arg("target").none(false),
          "file_nbytes"_a, "chunks"_a = py::none(), "threads"_a = 2);

    m.def("crc_sources", reading<std::uint32_t>(crc_sources), "sources"_a, "nbytes"_a, "offsets"_a, py::arg("base").none(false),
          "file_nbytes"_a, "chunks"_a = py::none(), "threads"_a = 2);

    m.def(
        "crc32c",
        [](const py::object& buffer, std::uint32_t seed) {
            const Bytes bytes(buffer);
            const py::gil_scoped_release release;
            return crc32c::finish(kernels().crc(crc32c::start(seed), bytes.data(), bytes.size()));
        },
        "buffer"_a, "seed"_a = 0);

    m.def(
        "copy_crc",
        [](const Memory& target, std::uint64_t offset, const py::object& source_buffer) {
            const Bytes source(source_buffer);
            Use use(target);
            if (!target->writable()) throw std::invalid_argument("the target is mapped read-only");
            if (offset > target->nbytes() || source.size() > target->nbytes() - offset)
                throw std::invalid_argument("the source does not fit behind the offset");
            unsigned char* to = target->data() + offset;
            const auto* from = static_cast<const unsigned char*>(source.data());
            if (source.size() != 0 && from < to + source.size() && to < from + source.size())
                throw std::invalid_argument("source and target overlap");
            const py::gil_scoped_release release;
            const std::uint32_t state = kernels().copy_crc(crc32c::start(0), to, from, source.size());
            store_fence();
            return crc32c::finish(state);
        },
        py::arg("target").none(false), "offset"_a, "source_buffer"_a);

    m.def("first_change", &first_change, "address_methods"_a, "size_methods"_a, "addresses"_a, "sizes"_a);

    m.def("cpu_features", [] {
        py::dict features;
        for (const auto& [name, present] : cpu_features()) features[py::str(name)] = present;
        features["paths"] = py::cast(runnable_kernels());
        features["path"] = kernels().name;
        return features;
    });
    m.def(
        "plain_copy",
        [](const Memory& target, std::uint64_t offset, const py::object& source_buffer, const std::string& mode,
           std::int64_t threads) {
            const Bytes source(source_buffer);
            const unsigned n = thread_count(threads);
            Use use(target);
            if (!target->writable()) throw std::invalid_argument("the target is mapped read-only");
            if (offset > target->nbytes() || source.size() > target->nbytes() - offset)
                throw std::invalid_argument("the source does not fit behind the offset");
            unsigned char* to = target->data() + offset;
            const auto* from = static_cast<const unsigned char*>(source.data());
            if (source.size() != 0 && from < to + source.size() && to < from + source.size())
                throw std::invalid_argument("source and target overlap");
            const CopyMode how = copy_mode(mode);
            const py::gil_scoped_release release;
            plain_copy(to, from, source.size(), how, n);
        },
        py::arg("target").none(false), "offset"_a, "source_buffer"_a, "mode"_a, "threads"_a = 2);
    m.def("select_cpu_path", &select_kernels, "name"_a);
    m.def("shutdown_pool", &shutdown_pool, py::call_guard<py::gil_scoped_release>());
    m.def("pool_threads", &pool_threads);
}
