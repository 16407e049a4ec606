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

SignedStore::Bytes SignedStore::verify(const std::string& name, const Bytes& found) const {
    const std::size_t bytes = found.size() - std::min(found.size(), sizeof(Digest));
    const Digest right = code_of(key_, name, found.data(), bytes);
    const bool is_right =
        found.size() >= right.size() && is_equal_in_constant_time(found.data() + bytes, right.data(), right.size());
    if (!is_right)
        C10_THROW_ERROR(DistStoreError, "the value of '" + name +
                                            "' in the store was not written by a rank of this group; another process "
                                            "writes to the store: see docs/security.md of dist_prims");
    return Bytes(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(bytes));
}

// A value that does not exist is empty, without a code.
SignedStore::Bytes SignedStore::compareSet(const std::string& name, const Bytes& expected, const Bytes& desired) {
    const Bytes found =
        store_->compareSet(name, expected.empty() ? Bytes() : sign(name, expected), sign(name, desired));
    return found.empty() ? Bytes() : verify(name, found);
}

std::vector<SignedStore::Bytes> SignedStore::multiGet(const Keys& names) {
    std::vector<Bytes> values = store_->multiGet(names);
    for (std::size_t each = 0; each < values.size(); ++each) values[each] = verify(names.at(each), values[each]);
    return values;
}

void SignedStore::multiSet(const Keys& names, const std::vector<Bytes>& values) {
    TORCH_CHECK_VALUE(names.size() == values.size(), "multi_set: ", names.size(), " keys and ", values.size(),
                      " values");
    std::vector<Bytes> all;
    for (std::size_t each = 0; each < names.size(); ++each) all.push_back(sign(names[each], values[each]));
    store_->multiSet(names, all);
}

void SignedStore::append(const std::string& name, const Bytes& /*value*/) {
    C10_THROW_ERROR(NotImplementedError, "append to '" + name + "': a store with signed values cannot append");
}

}  // namespace dist_prims
