/* The boundary between a program and its disk: loaded with LD_PRELOAD, it sees what is done below one folder.

   Files are opened, written, synced, renamed and removed by Python, by SQLite and by libraries in Rust; all of
   them call the C library. Each such operation below DISK_ROOT is counted in the file DISK_STATE, which says
   which ones fail, and is appended to the file DISK_LOG with its bytes. What goes to the standard streams and
   to sockets is in the log too: what was reported, and which calls have left. See disk.py. */

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define MOST 65536

enum kind { OPEN, WRITE, TRUNCATE, SYNC, RENAME, LINK, UNLINK, MKDIR, RMDIR, SAID, SENT };

struct state {
    int64_t count, first, last, error; /* operations so far; those from first to last fail with error */
    char kinds[MOST];                  /* the kind of each operation */
};
struct header {
    int64_t kind, offset, num_path, num_other, num_data;
};

static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static struct state *shared;
static int log_file = -1;
static int half_written = -1; /* a file whose next write fails, because the disk is full */

static const char *root(void) { return getenv("DISK_ROOT"); }

static long raw_open(const char *path, int flags) { return syscall(SYS_openat, AT_FDCWD, path, flags, 0600); }

static void begin(void) {
    pthread_mutex_lock(&turn);
    if (shared == NULL && getenv("DISK_STATE")) {
        long file = raw_open(getenv("DISK_STATE"), O_RDWR | O_CLOEXEC);
        shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        syscall(SYS_close, file);
    }
    if (log_file < 0 && getenv("DISK_LOG"))
        log_file = raw_open(getenv("DISK_LOG"), O_WRONLY | O_APPEND | O_CLOEXEC);
}

static long end(long result) {
    int error = errno;
    pthread_mutex_unlock(&turn);
    errno = error;
    return result;
}

/* The absolute path of a name, below the root; false if it lies elsewhere. */
static int below(int folder, const char *name, char *path) {
    char link[64];
    ssize_t size = 0;
    if (root() == NULL || name == NULL) return 0;
    if (name[0] != '/') {
        if (folder == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
        else snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        size = readlink(link, path, PATH_MAX / 2);
        if (size <= 0 || path[0] != '/') return 0;
        if (name[0]) path[size++] = '/';
    }
    snprintf(path + size, PATH_MAX - size, "%s", name);
    size = strlen(root());
    return strncmp(path, root(), size) == 0 && (path[size] == '/' || path[size] == 0);
}

static int is_below(int file, char *path) { return file > 2 && below(file, "", path); }

static void record(enum kind kind, const char *path, const char *other, int64_t offset, const void *data, size_t size) {
    struct header header = {kind, offset, strlen(path), other ? strlen(other) : 0, size};
    struct iovec parts[] = {{&header, sizeof header}, {(void *)path, header.num_path},
                            {(void *)other, header.num_other}, {(void *)data, size}};
    int error = errno;
    if (log_file >= 0) syscall(SYS_writev, log_file, parts, 4);
    errno = error;
}

/* Count an operation; whether it fails. */
static int fails(enum kind kind) {
    if (shared == NULL) return 0;
    int64_t number = shared->count++;
    if (number < MOST) shared->kinds[number] = kind;
    if (number < shared->first || number > shared->last) return 0;
    errno = shared->error;
    return 1;
}

/* --- operations on names ------------------------------------------------------------------------------- */

static int open_any(int folder, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    int is_written = flags & (O_WRONLY | O_RDWR | O_CREAT) && (flags & O_TMPFILE) != O_TMPFILE;
    if (!is_written || !below(folder, name, path)) return syscall(SYS_openat, folder, name, flags, mode);
    begin();
    if (fails(OPEN)) return end(-1);
    long file = syscall(SYS_openat, folder, name, flags, mode);
    if (file >= 0) record(OPEN, path, NULL, flags & O_TRUNC ? 1 : 0, NULL, 0);
    return end(file);
}

#define MODE(flags) ({ mode_t mode = 0; if ((flags) & (O_CREAT | O_TMPFILE)) { \
    va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); } mode; })
int open(const char *name, int flags, ...) { return open_any(AT_FDCWD, name, flags, MODE(flags)); }
int open64(const char *name, int flags, ...) { return open_any(AT_FDCWD, name, flags, MODE(flags)); }
int openat(int folder, const char *name, int flags, ...) { return open_any(folder, name, flags, MODE(flags)); }
int openat64(int folder, const char *name, int flags, ...) { return open_any(folder, name, flags, MODE(flags)); }
int creat(const char *name, mode_t mode) { return open_any(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }

static int two_names(enum kind kind, int folder, const char *name, int to, const char *other, long call, int flags) {
    char from[PATH_MAX], into[PATH_MAX];
    if (!below(folder, name, from) || !below(to, other, into)) return syscall(call, folder, name, to, other, flags);
    begin();
    if (fails(kind)) return end(-1);
    long result = syscall(call, folder, name, to, other, flags);
    if (result == 0) record(kind, from, into, 0, NULL, 0);
    return end(result);
}

int rename(const char *a, const char *b) { return two_names(RENAME, AT_FDCWD, a, AT_FDCWD, b, SYS_renameat2, 0); }
int renameat(int d, const char *a, int e, const char *b) { return two_names(RENAME, d, a, e, b, SYS_renameat2, 0); }
int renameat2(int d, const char *a, int e, const char *b, unsigned flags) {
    return two_names(RENAME, d, a, e, b, SYS_renameat2, flags);
}
int link(const char *a, const char *b) { return two_names(LINK, AT_FDCWD, a, AT_FDCWD, b, SYS_linkat, 0); }
int linkat(int d, const char *a, int e, const char *b, int flags) {
    return two_names(LINK, d, a, e, b, SYS_linkat, flags);
}

static int one_name(enum kind kind, int folder, const char *name, long call, int argument) {
    char path[PATH_MAX];
    if (!below(folder, name, path)) return syscall(call, folder, name, argument);
    begin();
    if (fails(kind)) return end(-1);
    long result = syscall(call, folder, name, argument);
    if (result == 0) record(kind, path, NULL, 0, NULL, 0);
    return end(result);
}

int unlink(const char *name) { return one_name(UNLINK, AT_FDCWD, name, SYS_unlinkat, 0); }
int unlinkat(int folder, const char *name, int flags) {
    return one_name(flags & AT_REMOVEDIR ? RMDIR : UNLINK, folder, name, SYS_unlinkat, flags);
}
int rmdir(const char *name) { return one_name(RMDIR, AT_FDCWD, name, SYS_unlinkat, AT_REMOVEDIR); }
int mkdir(const char *name, mode_t mode) { return one_name(MKDIR, AT_FDCWD, name, SYS_mkdirat, mode); }
int mkdirat(int folder, const char *name, mode_t mode) { return one_name(MKDIR, folder, name, SYS_mkdirat, mode); }

int truncate(const char *name, off_t size) {
    char path[PATH_MAX];
    if (!below(AT_FDCWD, name, path)) return syscall(SYS_truncate, name, size);
    begin();
    if (fails(TRUNCATE)) return end(-1);
    long result = syscall(SYS_truncate, name, size);
    if (result == 0) record(TRUNCATE, path, NULL, size, NULL, 0);
    return end(result);
}
int truncate64(const char *name, off_t size) { return truncate(name, size); }

/* --- operations on open files -------------------------------------------------------------------------- */

int ftruncate(int file, off_t size) {
    char path[PATH_MAX];
    if (!is_below(file, path)) return syscall(SYS_ftruncate, file, size);
    begin();
    if (fails(TRUNCATE)) return end(-1);
    long result = syscall(SYS_ftruncate, file, size);
    if (result == 0) record(TRUNCATE, path, NULL, size, NULL, 0);
    return end(result);
}
int ftruncate64(int file, off_t size) { return ftruncate(file, size); }

static int sync_any(int file, long call) {
    char path[PATH_MAX];
    if (!is_below(file, path)) return syscall(call, file);
    begin();
    if (fails(SYNC)) return end(-1);
    /* not synced in truth: the tests lose no power, and the log knows what a sync has kept */
    record(SYNC, path, NULL, call == SYS_fdatasync, NULL, 0);
    return end(0);
}
int fsync(int file) { return sync_any(file, SYS_fsync); }
int fdatasync(int file) { return sync_any(file, SYS_fdatasync); }

static ssize_t write_any(int file, const void *data, size_t size, int64_t place) {
    char path[PATH_MAX];
    int is_said = (file == 1 || file == 2) && root() != NULL;
    if (!is_said && !is_below(file, path))
        return place < 0 ? syscall(SYS_write, file, data, size) : syscall(SYS_pwrite64, file, data, size, place);
    begin();
    if (is_said) {
        record(SAID, "", NULL, file, data, size);
        return end(syscall(SYS_write, file, data, size));
    }
    if (half_written == file) {
        half_written = -1;
        errno = ENOSPC;
        return end(-1);
    }
    if (fails(WRITE)) {
        if (errno != ENOSPC || size < 2) return end(-1);
        half_written = file; /* a full disk takes what there is room for */
        size /= 2;
    }
    int64_t offset = place;
    if (place < 0) {
        struct stat about;
        int is_appended = syscall(SYS_fcntl, file, F_GETFL) & O_APPEND;
        offset = is_appended && fstat(file, &about) == 0 ? about.st_size : syscall(SYS_lseek, file, 0, SEEK_CUR);
    }
    ssize_t result = place < 0 ? syscall(SYS_write, file, data, size) : syscall(SYS_pwrite64, file, data, size, place);
    if (result > 0) record(WRITE, path, NULL, offset, data, result);
    return end(result);
}
ssize_t write(int file, const void *data, size_t size) { return write_any(file, data, size, -1); }
ssize_t pwrite(int file, const void *data, size_t size, off_t place) { return write_any(file, data, size, place); }
ssize_t pwrite64(int file, const void *data, size_t size, off_t place) { return write_any(file, data, size, place); }
/* Python copies files with it, and with read and write where there is none. */
ssize_t sendfile(int to, int from, off_t *place, size_t size) {
    (void)to, (void)from, (void)place, (void)size;
    errno = ENOSYS;
    return -1;
}
ssize_t sendfile64(int to, int from, off_t *place, size_t size) { return sendfile(to, from, place, size); }
ssize_t writev(int file, const struct iovec *parts, int num) {
    char path[PATH_MAX];
    if (!is_below(file, path)) return syscall(SYS_writev, file, parts, num);
    return num == 0 ? 0 : write_any(file, parts[0].iov_base, parts[0].iov_len, -1); /* may be short */
}

ssize_t send(int file, const void *data, size_t size, int flags) {
    if (root() != NULL) {
        begin();
        record(SENT, "", NULL, file, data, size);
        end(0);
    }
    return syscall(SYS_sendto, file, data, size, flags, NULL, 0);
}
