// Preloaded into a process, it says that the machine has FAKED_CORES cores.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int cores(void) { return atoi(getenv("FAKED_CORES")); }

int get_nprocs(void) { return cores(); }

int get_nprocs_conf(void) { return cores(); }

long sysconf(int name) {
  if (name == _SC_NPROCESSORS_CONF || name == _SC_NPROCESSORS_ONLN) return cores();
  return ((long (*)(int))dlsym(RTLD_NEXT, "sysconf"))(name);
}

int sched_getaffinity(pid_t process, size_t size, cpu_set_t *set) {
  memset(set, 0, size);
  for (int core = 0; core < cores(); core++) CPU_SET_S(core, size, set);
  return 0;
}
