#include "incremental_tensor.h"

namespace dist_prims {
namespace {

// Whether the bytes of both hold the same elements in the same order, without gaps.
bool have_same_layout(const at::Tensor& view, const at::Tensor& part) {
    return part.is_cpu() && part.layout() == at::kStrided && view.scalar_type() == part.scalar_type() &&
           view.sizes() == part.sizes() && view.strides() == part.strides() && view.is_non_overlapping_and_dense() &&
           !part.is_neg();
}

}  // namespace

IncrementalTensor::IncrementalTensor(const c10::intrusive_ptr<PrimsBackend>& backend, at::Tensor tensor,
                                     std::size_t budget, std::shared_ptr<IncrementalTensor> previous)
    : backend_(backend),
      tensor_(std::move(tensor)),
      number_(backend->next_incremental()),
      previous_(std::move(previous)),
      budget_(previous_ ? previous_->budget_ : std::make_shared<Budget>(budget)),
      incremental_(std::make_shared<IncrementalReduce>(bytes_of(tensor_), tensor_.nbytes(), type_of(tensor_),
                                                       backend->getRank(), backend->getSize(), budget_,
                                                       std::make_shared<at::Tensor>(tensor_))) {}

std::shared_ptr<IncrementalTensor> IncrementalTensor::make(const c10::intrusive_ptr<PrimsBackend>& backend,
                                                           at::Tensor tensor, std::size_t budget,
                                                           std::shared_ptr<IncrementalTensor> previous) {
    const bool is_real = at::isFloatingType(tensor.scalar_type()) && tensor.element_size() > 1;
    if (!is_real || !tensor.is_contiguous() || !backend->reduces_in_place(tensor)) return nullptr;
    return std::shared_ptr<IncrementalTensor>(
        new IncrementalTensor(backend, std::move(tensor), budget, std::move(previous)));
}

bool IncrementalTensor::put(std::size_t number, const at::Tensor& view, const at::Tensor& part, double factor) {
    if (!have_same_layout(view, part) || !backend_->reduces_in_place(tensor_)) return false;
    const auto begin = static_cast<std::size_t>(bytes_of(view) - bytes_of(tensor_));
    TORCH_CHECK_VALUE(begin <= tensor_.nbytes() && begin + view.nbytes() <= tensor_.nbytes(),
                      "put: the view is not one of this tensor");
    incremental_->put(number,
                      {{begin, begin + view.nbytes()}, bytes_of(part), factor, std::make_shared<at::Tensor>(part)});
    if (previous_) previous_->incremental_->progress();
    return true;
}

}  // namespace dist_prims
