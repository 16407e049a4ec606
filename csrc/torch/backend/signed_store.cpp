#include "signed_store.h"

#include <c10/util/Exception.h>

#include "../../common/authentication.h"

namespace dist_prims {
namespace {

// The length of the name comes first: no other pair of name and value gives the same text.
Digest code_of(const std::string& key, const std::string& name, const std::uint8_t* value, std::size_t bytes) {
    std::string text = std::to_string(name.size()) + " " + name;
    text.append(reinterpret_cast<const char*>(value), bytes);
    return authentication_code(key, text);
}

}  // namespace

SignedStore::Bytes SignedStore::sign(const std::string& name, const Bytes& value) const {
    Bytes signed_value = value;
    const Digest code = code_of(key_, name, value.data(), value.size());
    signed_value.insert(signed_value.end(), code.begin(), code.end());
    return signed_value;
}

SignedStore::Bytes SignedStore::verify(const std::string& name, const Bytes& signed_value) const {
    const std::size_t bytes = signed_value.size() - std::min(signed_value.size(), sizeof(Digest));
    const Digest code = code_of(key_, name, signed_value.data(), bytes);
    const bool is_valid = signed_value.size() >= code.size() &&
                          is_equal_in_constant_time(signed_value.data() + bytes, code.data(), code.size());
    if (!is_valid)
        C10_THROW_ERROR(DistStoreError, "the value of '" + name +
                                            "' in the store was not written by a rank of this group; another process "
                                            "writes to the store: see docs/security.md of dist_prims");
    return Bytes(signed_value.begin(), signed_value.begin() + static_cast<std::ptrdiff_t>(bytes));
}

// A value that does not exist is empty, without a code.
SignedStore::Bytes SignedStore::compareSet(const std::string& name, const Bytes& expected, const Bytes& desired) {
    const Bytes current =
        store_->compareSet(name, expected.empty() ? Bytes() : sign(name, expected), sign(name, desired));
    return current.empty() ? Bytes() : verify(name, current);
}

std::vector<SignedStore::Bytes> SignedStore::multiGet(const Keys& names) {
    std::vector<Bytes> values = store_->multiGet(names);
    for (std::size_t index = 0; index < values.size(); ++index) values[index] = verify(names.at(index), values[index]);
    return values;
}

void SignedStore::multiSet(const Keys& names, const std::vector<Bytes>& values) {
    TORCH_CHECK_VALUE(names.size() == values.size(), "multi_set: ", names.size(), " keys and ", values.size(),
                      " values");
    std::vector<Bytes> signed_values;
    for (std::size_t index = 0; index < names.size(); ++index)
        signed_values.push_back(sign(names[index], values[index]));
    store_->multiSet(names, signed_values);
}

void SignedStore::append(const std::string& name, const Bytes& /*value*/) {
    C10_THROW_ERROR(NotImplementedError, "append to '" + name + "': a store with signed values cannot append");
}

}  // namespace dist_prims
