// Calls functions of a shared library for another process, which speaks to it through stdin and
// stdout: so the tests of one machine drive a library built for another, run by an emulator.
//
// All numbers are 64 bits, little endian. Requests: 'A' size -> address, 'W' address size bytes,
// 'R' address size -> bytes, 'C' name arguments float -> result, 'S' address -> C string.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

constexpr int MAX_ARGUMENTS = 16;

void read_bytes(void* to, size_t size) {
  if (size && std::fread(to, 1, size, stdin) != size) std::exit(0);  // the other process has gone
}
void write_bytes(const void* from, size_t size) { std::fwrite(from, 1, size, stdout); }
int64_t read_number() {
  int64_t value;
  read_bytes(&value, sizeof value);
  return value;
}
std::string read_string() {
  std::string text((size_t)read_number(), 0);
  read_bytes(&text[0], text.size());
  return text;
}

// Integers and pointers go in registers of one sort and then on the stack, floats in another sort:
// so one signature serves all functions with at most one float and MAX_ARGUMENTS others.
typedef int64_t (*Function)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                            int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                            float);

int64_t call(void* library) {
  const std::string name = read_string();
  int64_t a[MAX_ARGUMENTS];
  for (int64_t& argument : a) argument = read_number();
  float number;
  read_bytes(&number, sizeof number);
  const Function f = (Function)dlsym(library, name.c_str());
  if (!f) {
    std::fprintf(stderr, "no function %s\n", name.c_str());
    std::exit(2);
  }
  return f(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13],
           a[14], a[15], number);
}

}  // namespace

int main(int argc, char** argv) {
  void* library = argc == 2 ? dlopen(argv[1], RTLD_NOW) : nullptr;
  if (!library) {
    std::fprintf(stderr, "cannot load the library: %s\n", argc == 2 ? dlerror() : "no path");
    return 2;
  }
  for (int request; (request = std::getchar()) != EOF; std::fflush(stdout)) {
    if (request == 'C') {
      const int64_t result = call(library);
      write_bytes(&result, sizeof result);
      continue;
    }
    const int64_t first = read_number();
    if (request == 'A') {
      const int64_t address = (int64_t)aligned_alloc(64, (size_t)(first + 63) / 64 * 64);
      write_bytes(&address, sizeof address);
    } else if (request == 'W') {
      read_bytes((void*)first, (size_t)read_number());
    } else if (request == 'R') {
      write_bytes((void*)first, (size_t)read_number());
    } else {
      const int64_t size = (int64_t)std::strlen((const char*)first);
      write_bytes(&size, sizeof size);
      write_bytes((const char*)first, (size_t)size);
    }
  }
}
