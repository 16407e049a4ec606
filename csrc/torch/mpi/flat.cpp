#include "flat.h"

namespace dist_prims::mpi {
namespace {

bool is_packed(const at::Tensor& tensor) {
    return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

}  // namespace

Flat::Flat(Tensors tensors) : tensors_(std::move(tensors)) {
    bool is_theirs = true;
    for (const auto& tensor : tensors_) {
        if (!tensor.numel()) continue;
        if (!data_) data_ = bytes_of(tensor);
        is_theirs = is_theirs && is_packed(tensor) && bytes_of(tensor) == data_ + size_;
        size_ += tensor.nbytes();
    }
    if (!is_theirs) take_memory();
}

void Flat::take_memory() {
    memory_ = at::empty({static_cast<int64_t>(size_) / tensors_[0].element_size()}, tensors_[0].dtype());
    data_ = bytes_of(memory_);
}

void Flat::fill(const Flat& output, const std::byte* in_place) {
    const bool overlaps = data_ < output.data_ + output.size_ && output.data_ < data_ + size_;
    if (overlaps && data_ != in_place && !memory_.defined()) take_memory();
    copy(false);
}

void Flat::copy(bool to_tensors) const {
    if (!memory_.defined()) return;
    int64_t place = 0;
    for (const auto& tensor : tensors_) {
        const at::Tensor piece = memory_.narrow(0, place, tensor.numel()).view(tensor.sizes());
        (to_tensors ? tensor : piece).copy_(to_tensors ? piece : tensor);
        place += tensor.numel();
    }
}

}  // namespace dist_prims::mpi
