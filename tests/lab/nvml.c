// NVIDIA's library, as far as a host is asked for its GPUs: it has as many as $NVML_GPUS says.
#include <stdio.h>
#include <stdlib.h>

int nvmlInit_v2(void) { return 0; }

int nvmlShutdown(void) { return 0; }

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    snprintf(text, size, "570.1");
    return 0;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 12080;
    return 0;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    const char *text = getenv("NVML_GPUS");
    *count = text ? atoi(text) : 0;
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(size_t)(index + 1);
    return 0;
}

int nvmlDeviceGetName(void *device, char *text, unsigned size) {
    (void)device;
    snprintf(text, size, "NVIDIA H100");
    return 0;
}

int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
    snprintf(text, size, "GPU-%zu", (size_t)device);
    return 0;
}

struct utilization { unsigned gpu, memory; };

int nvmlDeviceGetUtilizationRates(void *device, struct utilization *found) {
    (void)device;
    found->gpu = 50;
    found->memory = 5;
    return 0;
}

struct memory { unsigned long long total, free, used; };

int nvmlDeviceGetMemoryInfo(void *device, struct memory *found) {
    (void)device;
    found->total = found->free = 80ull << 30;
    found->used = 0;
    return 0;
}

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) {
    (void)device, (void)sensor;
    *celsius = 40;
    return 0;
}
