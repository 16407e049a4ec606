#include "creation_failure.h"

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include <chrono>
#include <thread>

#include "../common/work.h"

namespace dist_prims {
namespace {

using Kind = CommError::Kind;

constexpr std::chrono::seconds kTimeToWrite{1};
constexpr std::chrono::milliseconds kFirstPause{5};
const std::string kKey = "failed";  // value: "<number of the kind of the error> <message>"

}  // namespace

void CreationFailure::check() const {
    run_python_signal_handlers();
    if (const auto found = read_reason()) throw *found;
}

void CreationFailure::report(std::exception_ptr error) const {
    try {
        std::rethrow_exception(error);
    } catch (const CommError& found) {
        if (found.kind == Kind::kMismatch) throw;  // each rank finds a mismatch itself
        // A repeated error follows from the failure of another rank, which is about to write the first reason.
        if (const auto first = found.is_repeated ? await_reason() : read_reason()) throw *first;
        write_reason(found.kind, found.what());
        throw;
    } catch (const pybind11::error_already_set&) {
        write_reason(Kind::kInterrupted, rank_prefix() + "interrupted while the group was made");
        throw;
    } catch (const c10::Error& found) {  // here and below: to the other ranks, this rank has left the group
        write_reason(Kind::kPeerLeft, rank_prefix() + found.what_without_backtrace());
        throw;
    } catch (const std::exception& found) {
        const std::string text = rank_prefix() + found.what();
        write_reason(Kind::kPeerLeft, text);
        throw std::runtime_error(text);
    }
}

// Return why another rank has failed; nullopt if no rank has failed, or if the store does not answer: its process may
// have died.
std::optional<CommError> CreationFailure::read_reason() const {
    try {
        if (!store_->check({kKey})) return std::nullopt;
        const std::string value = store_->get_to_str(kKey);
        const std::size_t space = value.find(' ');
        return CommError(static_cast<Kind>(std::stoi(value.substr(0, space))),
                         rank_prefix() + "the group cannot be made: " + value.substr(space + 1));
    } catch (const std::exception&) {
        return std::nullopt;
    }
}

// Return why another rank has failed, and wait up to kTimeToWrite for it.
std::optional<CommError> CreationFailure::await_reason() const {
    const auto until = std::chrono::steady_clock::now() + kTimeToWrite;
    for (auto pause = kFirstPause;; pause *= 2) {
        const auto found = read_reason();
        if (found || std::chrono::steady_clock::now() >= until) return found;
        std::this_thread::sleep_for(pause);
        run_python_signal_handlers();
    }
}

void CreationFailure::write_reason(Kind kind, const std::string& text) const {
    try {
        if (!store_->check({kKey})) store_->set(kKey, std::to_string(static_cast<int>(kind)) + " " + text);
    } catch (const std::exception&) {  // the other ranks notice the end of this process or of its connections
    }
}

std::string CreationFailure::rank_prefix() const {
    return "rank " + std::to_string(rank_) + ": ";
}

}  // namespace dist_prims
