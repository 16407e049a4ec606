#include "creation_failure.h"

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include <chrono>
#include <thread>

#include "../common/python_signals.h"

namespace dist_prims {
namespace {

using Kind = CommError::Kind;

constexpr std::chrono::seconds kTimeToWrite{1};  // for the first rank that fails to write its reason
constexpr std::chrono::milliseconds kFirstPause{5};
const std::string kKey = "failed";  // in the store; its value is "<CommError::Kind as a number> <message>"

}  // namespace

void CreationFailure::check() const {
    run_python_signal_handlers();
    if (const auto reason = read_reason()) throw *reason;
}

void CreationFailure::report(std::exception_ptr error) const {
    try {
        std::rethrow_exception(error);
    } catch (const CommError& failure) {
        if (failure.kind == Kind::kMismatch) throw;  // every rank finds the same mismatch, and throws it
        // A repeated error follows from the failure of another rank, which is about to write the first reason.
        if (const auto first = failure.is_repeated ? await_reason() : read_reason()) throw *first;
        write_reason(failure.kind, failure.what());
        throw;
    } catch (const pybind11::error_already_set&) {  // a signal handler of Python has raised, such as by Ctrl-C
        write_reason(Kind::kInterrupted, rank_prefix() + "interrupted while the group was made");
        throw;
    } catch (const c10::Error& failure) {  // here and below: for the other ranks, this rank has left the group
        write_reason(Kind::kPeerLeft, rank_prefix() + failure.what_without_backtrace());
        throw;
    } catch (const std::exception& failure) {
        const std::string text = rank_prefix() + failure.what();
        write_reason(Kind::kPeerLeft, text);
        throw std::runtime_error(text);
    }
}

// Returns why another rank has failed; nullopt if no rank has written a reason, or if the store does not answer, as
// after the death of its process.
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

// As read_reason(), but waits up to kTimeToWrite until a reason is written.
std::optional<CommError> CreationFailure::await_reason() const {
    const auto until = std::chrono::steady_clock::now() + kTimeToWrite;
    for (auto pause = kFirstPause;; pause *= 2) {
        const auto reason = read_reason();
        if (reason || std::chrono::steady_clock::now() >= until) return reason;
        std::this_thread::sleep_for(pause);
        run_python_signal_handlers();
    }
}

// Keeps the reason of a rank that has failed before.
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
