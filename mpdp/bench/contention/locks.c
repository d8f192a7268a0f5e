/* Counts the calls of pthread's locks that one library makes, how many had to wait, and for how long.
 *
 * Preloaded (LD_PRELOAD), it stands before pthread's functions of the same names. What a caller outside of the library
 * asks for is passed on uncounted. Each thread counts in a slot of its own, so that counting adds no sharing. Locks that
 * a library builds of futexes or by spinning are not seen.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define SLOTS 512

enum { CALLS, CONTENDED, WAITED, FIGURES };

static struct {
    int64_t figures[FIGURES];
    char apart[128 - FIGURES * sizeof(int64_t)];
} slots[SLOTS];
static int taken;
static __thread int mine __attribute__((tls_model("initial-exec")));
static uintptr_t from, to; /* where the library's code lies */

typedef int (*of_mutex)(pthread_mutex_t *);
typedef int (*of_rwlock)(pthread_rwlock_t *);
static of_mutex mutex_lock, mutex_trylock;
static of_rwlock read_lock, read_trylock, write_lock, write_trylock;

static void find(void) {
    read_lock = (of_rwlock)dlsym(RTLD_NEXT, "pthread_rwlock_rdlock");
    read_trylock = (of_rwlock)dlsym(RTLD_NEXT, "pthread_rwlock_tryrdlock");
    write_lock = (of_rwlock)dlsym(RTLD_NEXT, "pthread_rwlock_wrlock");
    write_trylock = (of_rwlock)dlsym(RTLD_NEXT, "pthread_rwlock_trywrlock");
    mutex_trylock = (of_mutex)dlsym(RTLD_NEXT, "pthread_mutex_trylock");
    mutex_lock = (of_mutex)dlsym(RTLD_NEXT, "pthread_mutex_lock");
}
__attribute__((constructor)) static void start(void) { find(); }

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int counts(const void *caller) { return (uintptr_t)caller >= from && (uintptr_t)caller < to; }

static int64_t *slot(void) {
    if (!mine) mine = 1 + __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED) % SLOTS;
    return slots[mine - 1].figures;
}

#define COUNTED(try, lock, thing)                       \
    if (!lock) find();                                  \
    if (!counts(__builtin_return_address(0))) return lock(thing); \
    int64_t *figures = slot();                          \
    figures[CALLS]++;                                   \
    int status = try(thing);                            \
    if (status != EBUSY) return status;                 \
    const int64_t before = now();                       \
    status = lock(thing);                               \
    figures[CONTENDED]++;                               \
    figures[WAITED] += now() - before;                  \
    return status;

int pthread_mutex_lock(pthread_mutex_t *mutex) { COUNTED(mutex_trylock, mutex_lock, mutex) }
int pthread_rwlock_rdlock(pthread_rwlock_t *lock) { COUNTED(read_trylock, read_lock, lock) }
int pthread_rwlock_wrlock(pthread_rwlock_t *lock) { COUNTED(write_trylock, write_lock, lock) }

static int look(struct dl_phdr_info *info, size_t size, void *name) {
    (void)size;
    if (!info->dlpi_name || !strstr(info->dlpi_name, name)) return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        if (part->p_type == PT_LOAD && part->p_flags & PF_X) {
            const uintptr_t first = info->dlpi_addr + part->p_vaddr;
            if (!from || first < from) from = first;
            if (first + part->p_memsz > to) to = first + part->p_memsz;
        }
    }
    return 1;
}

/* Count the calls of the first library with this in its path from now on; return whether there is one. */
int mpdp_locks_of(const char *name) {
    from = to = 0;
    return dl_iterate_phdr(look, (void *)name);
}

/* Give the sums of all threads since the last call of this. */
void mpdp_locks_read(int64_t *sums) {
    memset(sums, 0, FIGURES * sizeof *sums);
    for (int i = 0; i < SLOTS; i++)
        for (int j = 0; j < FIGURES; j++) sums[j] += slots[i].figures[j], slots[i].figures[j] = 0;
}
