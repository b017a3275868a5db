/* A libnvidia-ml.so.1 for tests, with the signatures and layouts of NVIDIA's nvml.h that pynvml calls.
   FAKE_NVML_GPUS names its GPUs by address. FAKE_NVML_EVENTS is a FIFO of orders, one a line, for whoever waits for events:
   "xid ADDRESS NUMBER [GI]", "ecc ADDRESS", "lost ADDRESS", "hang", "crash". FAKE_NVML_LOG gets a line for each call that
   matters. FAKE_NVML_INIT is "hang" or "crash" where opening it is. */
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TIMEOUT = 10, GPU_IS_LOST = 15 };

typedef struct { char address[32]; int lost; unsigned long long registered; } gpu_t;
typedef gpu_t *nvmlDevice_t;
typedef struct {
    nvmlDevice_t device;
    unsigned long long eventType;
    unsigned long long eventData;
    unsigned int gpuInstanceId;
    unsigned int computeInstanceId;
} nvmlEventData_t;
typedef struct {
    char busIdLegacy[16];
    unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;

static gpu_t gpus[16];
static unsigned int count;
static int orders = -1;

static void note(const char *what, const char *which) {
    const char *path = getenv("FAKE_NVML_LOG");
    FILE *log = path ? fopen(path, "a") : NULL;
    if (log) { fprintf(log, "%s %s\n", what, which); fclose(log); }
}

static gpu_t *find(const char *address) {
    for (unsigned int i = 0; i < count; i++)
        if (!strcmp(gpus[i].address, address)) return &gpus[i];
    return NULL;
}

static void misbehave(const char *how) {
    if (!strcmp(how, "crash")) abort();
    while (!strcmp(how, "hang")) pause();
}

int nvmlInitWithFlags(unsigned int flags) {
    char names[512] = "", *rest = names;
    const char *init = getenv("FAKE_NVML_INIT");
    note("init", flags ? "without GPUs" : "");
    if (init) misbehave(init);
    snprintf(names, sizeof names, "%s", getenv("FAKE_NVML_GPUS") ? getenv("FAKE_NVML_GPUS") : "");
    for (char *name; (name = strtok_r(rest, " ", &rest)); count++) snprintf(gpus[count].address, 32, "%s", name);
    return SUCCESS;
}

const char *nvmlErrorString(int code) { return code == GPU_IS_LOST ? "GPU is lost" : "some error"; }

int nvmlDeviceGetCount_v2(unsigned int *number) { *number = count; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    *device = &gpus[index];
    return gpus[index].lost ? GPU_IS_LOST : SUCCESS;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *address, nvmlDevice_t *device) {
    if (!(*device = find(address))) return NOT_FOUND;
    return (*device)->lost ? GPU_IS_LOST : SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *info) {
    memset(info, 0, sizeof *info);
    snprintf(info->busId, sizeof info->busId, "0000%s", device->address);
    return SUCCESS;
}

int nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length) {
    snprintf(uuid, length, "GPU-00000000-0000-0000-0000-%012d", (int)(device - gpus));
    return SUCCESS;
}

int nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending) {
    *current = *pending = 0;
    return device ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, unsigned int *active) { return NOT_SUPPORTED; }

int nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types) { *types = 0x1a; return SUCCESS; }

int nvmlEventSetCreate(void **set) {
    *set = &orders;
    for (unsigned int i = 0; i < count; i++) gpus[i].registered = 0;
    return SUCCESS;
}

int nvmlEventSetFree(void *set) { return SUCCESS; }

int nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, void *set) {
    device->registered = types;
    note("register", device->address);
    return SUCCESS;
}

static int order(char *line, size_t size) { /* one line of the FIFO; 0 where it has none */
    size_t length = 0;
    while (length < size - 1 && read(orders, line + length, 1) == 1)
        if (line[length++] == '\n') { line[length - 1] = 0; return 1; }
    return 0;
}

int nvmlEventSetWait_v2(void *set, nvmlEventData_t *event, unsigned int milliseconds) {
    char line[128], what[16] = "", address[32] = "";
    unsigned int number = 0, gi = 0xFFFFFFFF;
    struct pollfd ready;
    for (unsigned int i = 0; i < count; i++)
        if (gpus[i].registered && gpus[i].lost) return GPU_IS_LOST;
    if (orders < 0) orders = open(getenv("FAKE_NVML_EVENTS"), O_RDWR | O_NONBLOCK);
    ready.fd = orders, ready.events = POLLIN;
    if (poll(&ready, 1, (int)milliseconds) <= 0 || !order(line, sizeof line)) return TIMEOUT;
    sscanf(line, "%15s %31s %u %u", what, address, &number, &gi);
    misbehave(what);
    gpu_t *gpu = find(address);
    if (!gpu) return TIMEOUT;
    if (!strcmp(what, "lost")) { gpu->lost = 1; return GPU_IS_LOST; }
    event->device = gpu;
    event->eventType = !strcmp(what, "ecc") ? 2 : 8;
    event->eventData = number;
    event->gpuInstanceId = gi, event->computeInstanceId = 0xFFFFFFFF;
    return gpu->registered & event->eventType ? SUCCESS : TIMEOUT;
}
