#include "engine.h"

#include <ATen/ATen.h>
#include <pybind11/pybind11.h>

namespace dist_prims {
namespace {

template <typename Do>
auto told_from_ctrl_c(const Do& act) {
    try {
        return act();
    } catch (const pybind11::error_already_set&) {
        throw;
    } catch (const std::exception& error) {
        throw Engine::Broken(error.what());
    }
}

class WorkLetter : public Engine::Letter {
public:
    explicit WorkLetter(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}

    bool wait(std::chrono::milliseconds limit) override {
        return told_from_ctrl_c([&] { return work_->wait(limit); });
    }
    bool is_done() override { return work_->isCompleted(); }
    void abort() override { work_->abort(); }

private:
    const c10::intrusive_ptr<c10d::Work> work_;
};

std::vector<at::Tensor> tensor_of(const std::byte* data, std::size_t bytes) {
    auto* place = const_cast<std::byte*>(data);  // one that is sent is only read
    return {at::from_blob(place, {static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte))};
}

}  // namespace

Engine::Handle BackendEngine::send(int to, int tag, const std::byte* data, std::size_t bytes) {
    auto tensors = tensor_of(data, bytes);
    return told_from_ctrl_c([&] { return std::make_unique<WorkLetter>(backend_->send(tensors, to, tag)); });
}

Engine::Handle BackendEngine::receive(int from, int tag, std::byte* data, std::size_t bytes) {
    auto tensors = tensor_of(data, bytes);
    return told_from_ctrl_c([&] {
        return std::make_unique<WorkLetter>(from == kAnyone ? backend_->recvAnysource(tensors, tag)
                                                            : backend_->recv(tensors, from, tag));
    });
}

}  // namespace dist_prims
