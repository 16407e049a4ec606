#include "flat.h"

#include <numeric>

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

Tensors blocks(const char* what, const at::Tensor& tensor, int size, const std::vector<int64_t>& splits) {
    const auto wanted = static_cast<std::size_t>(size);
    if (splits.empty()) {
        TORCH_CHECK_VALUE(tensor.numel() % size == 0, what, ": ", tensor.numel(),
                          " elements cannot be shared evenly by ", size, " ranks");
        return tensor.reshape(-1).split_with_sizes(std::vector<int64_t>(wanted, tensor.numel() / size));
    }
    const int64_t rows = tensor.dim() ? tensor.size(0) : 1;
    TORCH_CHECK_VALUE(splits.size() == wanted && std::accumulate(splits.begin(), splits.end(), int64_t{0}) == rows,
                      what, ": ", splits.size(), " split sizes must be ", size, " and add up to ", rows);
    return tensor.split_with_sizes(splits);
}

}  // namespace dist_prims::mpi
