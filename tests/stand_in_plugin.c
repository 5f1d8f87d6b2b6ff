/* A PJRT plug-in that is another one under the name gcu: what JAX asks it is passed on, but for the platform's name.

   Build with -DPLUGIN='"/path/to/the/other.so"'. Offsets are those of PJRT's C API (xla/pjrt/c/pjrt_c_api.h), to which
   fields are only ever added at the end. */

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef struct {
  size_t struct_size;
  void *extensions;
} Header;

typedef struct {
  Header header;
  void *client;
  const char *name;
  size_t name_size;
} PlatformNameArguments;

enum { VERSION_BYTES = 24, PLATFORM_NAME = 12, MOST_BYTES = 1 << 14 };

static _Alignas(16) char api[MOST_BYTES];

static void *platform_name(PlatformNameArguments *arguments) {
  arguments->name = "gcu";
  arguments->name_size = 3;
  return NULL; /* no error */
}

const void *GetPjrtApi(void) {
  if (api[0]) return api;
  void *plugin = dlopen(PLUGIN, RTLD_NOW | RTLD_LOCAL);
  const Header *(*get)(void) = plugin ? (const Header *(*)(void))dlsym(plugin, "GetPjrtApi") : NULL;
  const Header *found = get ? get() : NULL;
  if (!found || found->struct_size > MOST_BYTES) {
    fprintf(stderr, "%s cannot be used: %s\n", PLUGIN, found ? "its table is too large" : dlerror());
    return NULL;
  }
  memcpy(api, found, found->struct_size);
  void *own = (void *)platform_name;
  memcpy(api + sizeof(Header) + VERSION_BYTES + PLATFORM_NAME * sizeof(void *), &own, sizeof own);
  return api;
}
