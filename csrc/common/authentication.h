// Codes that show that the sender of a text knows a key: HMAC with SHA-256 (RFC 2104, FIPS 180-4).
//
// The codes of Python are made by its module hmac. The core needs codes where Python must not run: in the thread that
// accepts connections, and in a store that threads of gloo and NCCL use. A library of cryptography would be a further
// dependency of every wheel; tests/backend/test_signed_store.py compares the codes with those of Python.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>

namespace dist_prims {

using Digest = std::array<unsigned char, 32>;

// The code of a text, which cannot be made or checked without the key.
Digest authentication_code(std::string_view key, std::string_view text);

// Whether two byte sequences of this length are equal. The time does not depend on where they differ.
bool is_equal_in_constant_time(const unsigned char* one, const unsigned char* other, std::size_t bytes);

}  // namespace dist_prims
