// Linked into a library that is compiled with -fsanitize-coverage=trace-pc: marks each basic block that is executed, in
// a file that all processes of a test map.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>

extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start;  // first byte of this library
extern "C" __attribute__((visibility("hidden"))) const char etext;         // end of its code

namespace {

unsigned char* marks = nullptr;

__attribute__((constructor(101))) void open_marks() {
    const char* folder = std::getenv("LINE_COVERAGE");
    Dl_info library{};
    if (!folder || !dladdr(&__ehdr_start, &library)) return;
    const char* slash = std::strrchr(library.dli_fname, '/');
    const std::string path = std::string(folder) + '/' + (slash ? slash + 1 : library.dli_fname) + ".marks";
    const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file < 0) return;
    const auto size = static_cast<size_t>(&etext - &__ehdr_start);
    void* memory = MAP_FAILED;
    if (!::ftruncate(file, static_cast<off_t>(size)))
        memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    ::close(file);
    if (memory != MAP_FAILED) marks = static_cast<unsigned char*>(memory);
}

}  // namespace

// Called by the compiled code at the start of each basic block.
extern "C" __attribute__((visibility("hidden"))) void __sanitizer_cov_trace_pc() {
    if (!marks) return;
    unsigned char& mark = marks[static_cast<const char*>(__builtin_return_address(0)) - &__ehdr_start];
    if (!mark) mark = 1;
}
