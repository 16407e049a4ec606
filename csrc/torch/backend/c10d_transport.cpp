#include "c10d_transport.h"

#include <ATen/ATen.h>
#include <pybind11/pybind11.h>

#include "../../common/thread.h"

namespace dist_prims {
namespace {

template <typename Do>
auto translate_errors(const Do& act) {
    try {
        return act();
    } catch (const pybind11::error_already_set&) {
        throw;
    } catch (const std::exception& error) {
        throw Transport::TransportError(error.what());
    }
}

class WorkRequest : public Transport::TransportRequest {
public:
    explicit WorkRequest(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}
    // A backend whose group has ended learns here that it must not use the memory any more.
    ~WorkRequest() override {
        if (is_over_) return;
        caught([this] {
            abort();
            is_done();
        });
    }

    bool wait(std::chrono::milliseconds limit) override {
        return is_over_ = translate_errors([&] { return work_->wait(limit); });
    }
    bool is_done() override { return work_->isCompleted(); }
    void abort() override { work_->abort(); }

private:
    const c10::intrusive_ptr<c10d::Work> work_;
    bool is_over_ = false;
};

// The tensor shares the owner of its memory.
std::vector<at::Tensor> tensor_of(const std::byte* data, std::size_t bytes, Transport::Owner owner) {
    auto* place = const_cast<std::byte*>(data);  // a send only reads it
    const auto size = static_cast<int64_t>(bytes);
    const auto options = at::TensorOptions().dtype(at::kByte);
    if (!owner) return {at::from_blob(place, {size}, options)};
    return {at::from_blob(place, {size}, [owner = std::move(owner)](void*) {}, options)};
}

}  // namespace

Transport::Handle C10dTransport::send(int to, int tag, const std::byte* data, std::size_t bytes, Owner owner) {
    auto tensors = tensor_of(data, bytes, std::move(owner));
    return translate_errors([&] { return std::make_unique<WorkRequest>(backend_->send(tensors, to, tag)); });
}

Transport::Handle C10dTransport::receive(int from, int tag, std::byte* data, std::size_t bytes, Owner owner) {
    auto tensors = tensor_of(data, bytes, std::move(owner));
    return translate_errors([&] {
        return std::make_unique<WorkRequest>(from == kAnyone ? backend_->recvAnysource(tensors, tag)
                                                             : backend_->recv(tensors, from, tag));
    });
}

}  // namespace dist_prims
