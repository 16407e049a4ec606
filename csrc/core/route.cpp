#include "route.h"

namespace dist_prims {
namespace {

constexpr Mail::Tag kOurs = Mail::Tag{1} << 63;  // beyond the tags of users

}  // namespace

Route::Letter Route::send(int to, std::uint64_t number, const std::byte* data, std::size_t bytes,
                          std::chrono::milliseconds timeout) {
    if (seat(to) < 0) return {nullptr, far_->send(to, number, data, bytes, timeout)};
    const auto patience = far_ ? timeout + Far::kAfterOthers : timeout;
    return {mail_.send(seat(to), kOurs | number, data, bytes, patience, nullptr), nullptr};
}

Route::Letter Route::receive(int from, std::uint64_t number, std::byte* data, std::size_t bytes,
                             std::chrono::milliseconds timeout) {
    if (seat(from) < 0) return {nullptr, far_->receive(from, number, data, bytes, timeout)};
    const auto patience = far_ ? timeout + Far::kAfterOthers : timeout;
    return {mail_.receive(seat(from), kOurs | number, data, bytes, patience, nullptr), nullptr};
}

void Route::wait(const std::vector<Letter>& letters) {
    for (const Letter& letter : letters) {
        if (!letter.near) continue;
        mail_.wait(letter.near, std::chrono::milliseconds::max());
        if (letter.near->error) std::rethrow_exception(letter.near->error);
    }
    for (const Letter& letter : letters) {
        if (letter.far) far_->wait(letter.far);
    }
}

}  // namespace dist_prims
