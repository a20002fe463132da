// Preloaded, it makes all threads but the first late: each sleeps after it has woken others (so that the first goes on
// to its end meanwhile), and once more between asking whether Python runs and taking its lock.

#include <dlfcn.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

static void sleep_in_thread(int milliseconds) {
    if (syscall(SYS_gettid) != getpid()) usleep(milliseconds * 1000);
}

extern "C" int pthread_cond_broadcast(pthread_cond_t *condition) noexcept {
    static auto broadcast = (int (*)(pthread_cond_t *))dlvsym(RTLD_NEXT, "pthread_cond_broadcast", "GLIBC_2.3.2");
    int status = broadcast(condition);
    sleep_in_thread(5);
    return status;
}

extern "C" int Py_IsInitialized() {
    static auto is_initialized = (int (*)())dlsym(RTLD_NEXT, "Py_IsInitialized");
    int status = is_initialized();
    sleep_in_thread(100);
    return status;
}
