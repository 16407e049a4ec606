// A store whose values are signed, so that a rank notices a value that was not written by a rank of its group.
//
// A TCPStore lets every process that can connect to it write. Each value is therefore stored with a code behind it, an
// HMAC over its name and the value. A value without the right code is an error for the rank that reads it. The key of
// the HMAC belongs to one attempt to make one group (dist_prims/rendezvous/handshake.py), so a value of another group
// or attempt is an error as well.
//
// Not protected: counters (`add`), since their value is made by the server; which keys exist; an earlier value of the
// same key. A value can be read by every process that can read the store.
#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace dist_prims {

class SignedStore : public c10d::Store {
public:
    using Bytes = std::vector<std::uint8_t>;
    using Keys = std::vector<std::string>;

    // `key` is the key of the HMAC; the names of values are called names here, and keys in c10d::Store.
    SignedStore(c10::intrusive_ptr<c10d::Store> store, std::string key)
        : store_(std::move(store)), key_(std::move(key)) {}

    c10::intrusive_ptr<c10d::Store> clone() override { return c10::make_intrusive<SignedStore>(store_->clone(), key_); }

    using Store::set;
    void set(const std::string& name, const Bytes& value) override { store_->set(name, sign(name, value)); }
    Bytes get(const std::string& name) override { return verify(name, store_->get(name)); }
    using Store::compareSet;
    Bytes compareSet(const std::string& name, const Bytes& expected, const Bytes& desired) override;
    std::vector<Bytes> multiGet(const Keys& names) override;
    void multiSet(const Keys& names, const std::vector<Bytes>& values) override;
    void append(const std::string& name, const Bytes& value) override;

    std::int64_t add(const std::string& name, std::int64_t value) override { return store_->add(name, value); }
    bool deleteKey(const std::string& name) override { return store_->deleteKey(name); }
    bool check(const Keys& names) override { return store_->check(names); }
    std::int64_t getNumKeys() override { return store_->getNumKeys(); }
    void wait(const Keys& names) override { store_->wait(names); }
    void wait(const Keys& names, const std::chrono::milliseconds& timeout) override { store_->wait(names, timeout); }
    const std::chrono::milliseconds& getTimeout() const noexcept override { return store_->getTimeout(); }
    void setTimeout(const std::chrono::milliseconds& timeout) override { store_->setTimeout(timeout); }
    bool hasExtendedApi() const override { return store_->hasExtendedApi(); }

private:
    Bytes sign(const std::string& name, const Bytes& value) const;
    // Returns the value without its code; throws DistStoreError if the code is wrong.
    Bytes verify(const std::string& name, const Bytes& signed_value) const;

    const c10::intrusive_ptr<c10d::Store> store_;
    const std::string key_;
};

}  // namespace dist_prims
