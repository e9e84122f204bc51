// Errors that the native code raises; bindings.cpp turns them into Python's.
//
//   OsError            -> OSError(errno, text, path)
//   std::invalid_argument -> ValueError     an argument that would be unsafe to use; nothing was done
//   InUse              -> BufferError       memory that somebody still points to
//   std::runtime_error -> RuntimeError
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace memckpt {

struct OsError : std::runtime_error {
    OsError(int code_, const std::string& what, std::string path_)
        : std::runtime_error(what), code(code_), path(std::move(path_)) {}
    int code;          // errno
    std::string path;  // file concerned
};

struct InUse : std::runtime_error {
    using std::runtime_error::runtime_error;
};

}  // namespace memckpt
