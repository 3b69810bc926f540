/* The compiled part of stagereg.base for many small tensors: describes, compares and creates them, in few calls.
 *
 * It calls torch through the C interface in `torch.Tensor.__dlpack_c_exchange_api__`, so it is built without torch. The
 * structs are those of DLPack 1.3 (https://dmlc.github.io/dlpack/latest/c_api.html). This file is optional: setup.py
 * builds it, and many_tensors.py loads it with ctypes. The caller of all functions holds the GIL.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PART 2048 /* tensors that are created before another thread, which copies bytes, can take the GIL */
#define AHEAD 8   /* tensors between the steps that load a tensor's memory into the CPU cache before it is used */

#if defined(__GNUC__)
#define prefetch(address) __builtin_prefetch(address)
#else
#define prefetch(address) ((void)(address))
#endif

typedef struct {
    void *data;
    int32_t device[2], ndim; /* type and index of the device; {1, 0} is the CPU */
    uint8_t dtype[4];
    int64_t *shape, *strides;
    uint64_t offset;
} Tensor;

typedef struct Managed {
    uint32_t version[2];
    void *context;
    void (*deleter)(struct Managed *);
    uint64_t flags;
    Tensor tensor;
} Managed;

typedef struct {
    uint32_t version[2];
    void *previous, *allocate, *export;
    int (*import)(Managed *, void **);  /* creates a torch.Tensor; its storage calls the deleter when it is freed */
    int (*describe)(PyObject *, Tensor *); /* describes a torch.Tensor, which keeps its shape and its strides */
} Exchange;

/* The tensors of one call of stagereg_create. They keep `owner` alive. */
typedef struct {
    atomic_size_t users;
    PyObject *owner;
    Managed each[];
} Group;

/* Return the size of the shape of a tensor, and of its strides. In a description, both follow the Tensor. */
static size_t shape_bytes(const Tensor *x)
{
    return (size_t)x->ndim * sizeof(int64_t);
}

/* Return the descriptions of the tensors in a list, as bytes. Raise torch's error if it cannot describe a tensor. */
PyObject *stagereg_describe(const Exchange *torch, PyObject *tensors)
{
    PyObject *found = NULL;
    char *at = NULL;
    for (int pass = 0; pass < 2; pass++) { /* the first pass adds up the sizes */
        size_t size = 0;
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); i++) {
            Tensor x = {0};
            if (torch->describe(PyList_GET_ITEM(tensors, i), &x)) {
                Py_XDECREF(found);
                return NULL;
            }
            size_t bytes = shape_bytes(&x);
            size += sizeof x + 2 * bytes;
            if (pass) {
                memcpy(at + sizeof x, x.shape, bytes);
                memcpy(at + sizeof x + bytes, x.strides, bytes);
                x.shape = x.strides = NULL;
                memcpy(at, &x, sizeof x);
                at += sizeof x + 2 * bytes;
            }
        }
        if (!pass) {
            found = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
            if (!found)
                return NULL;
            at = PyBytes_AS_STRING(found);
        }
    }
    return found;
}

/* Return whether the tensors in a list have the descriptions at `at`, of which there are as many.
 *
 * `places` has the offset of the pointer to torch's TensorImpl in a Python tensor, and the offset of the pointer to
 * the StorageImpl in that; or zeros. They serve only to load memory into the CPU cache.
 */
int stagereg_match(const Exchange *torch, PyObject *tensors, const char *at, const Py_ssize_t *places)
{
    Py_ssize_t count = PyList_GET_SIZE(tensors);
    for (Py_ssize_t i = -3 * AHEAD; i < count; i++) {
        if (places[0] && i + 3 * AHEAD < count)
            prefetch(PyList_GET_ITEM(tensors, i + 3 * AHEAD));
        for (int step = 2; places[0] && step > 0; step--) {
            Py_ssize_t k = i + step * AHEAD;
            if (k < 0 || k >= count)
                continue;
            const char *inner = *(const char **)((const char *)PyList_GET_ITEM(tensors, k) + places[0]);
            if (step == 1)
                prefetch(*(const char **)(inner + places[1]));
            for (int line = 0; step == 2 && line < 3; line++)
                prefetch(inner + 64 * line);
        }
        if (i < 0)
            continue;
        Tensor x = {0}, known;
        if (torch->describe(PyList_GET_ITEM(tensors, i), &x)) {
            PyErr_Clear();
            return 0;
        }
        memcpy(&known, at, sizeof known);
        size_t bytes = shape_bytes(&known);
        const char *shape = at + sizeof x, *strides = shape + bytes;
        if (x.ndim != known.ndim || memcmp(x.shape, shape, bytes) || memcmp(x.strides, strides, bytes))
            return 0;
        x.shape = x.strides = NULL;
        if (memcmp(&x, &known, sizeof x))
            return 0;
        at = strides + bytes;
    }
    return 1;
}

/* Return whether an object in a list has attributes of its own. Does not create a `__dict__`, as Python code would. */
int stagereg_attributes(PyObject *objects)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(objects); i++) {
        PyObject **attributes = _PyObject_GetDictPtr(PyList_GET_ITEM(objects, i));
        if (attributes && *attributes && PyDict_GET_SIZE(*attributes))
            return 1;
    }
    return 0;
}

/* Count `users` less of a group. The last one frees it, on any thread, with the GIL or without it. */
static void leave(Group *group, size_t users)
{
    if (atomic_fetch_sub(&group->users, users) != users)
        return;
    if (Py_IsInitialized()) {
        PyGILState_STATE state = PyGILState_Ensure();
        Py_DECREF(group->owner);
        PyGILState_Release(state);
    }
    free(group);
}

static void delete(Managed *tensor)
{
    leave(tensor->context, 1);
}

/* Return a list of `count` new tensors on the CPU, each with its own storage. Tensor i is like description i at `at`,
 * but begins at `base + offsets[i]`. If the offset is negative, the list contains None instead. The tensors keep
 * `owner` alive, which must keep the memory and the descriptions alive.
 */
PyObject *stagereg_create(const Exchange *torch, PyObject *owner, uintptr_t base, const char *at, const int64_t *offsets,
                          Py_ssize_t count)
{
    PyObject *made = PyList_New(count);
    Group *group = malloc(sizeof *group + (size_t)count * sizeof *group->each);
    if (!made || !group) {
        Py_XDECREF(made);
        free(group);
        return PyErr_NoMemory();
    }
    atomic_init(&group->users, 1); /* this function */
    group->owner = Py_NewRef(owner);
    for (Py_ssize_t i = 0, end = 0; i < count; i++) {
        if (i == end) {
            end = count - i < PART ? count : i + PART;
            Py_BEGIN_ALLOW_THREADS
            for (Py_ssize_t k = i; k < end; k++) {
                Managed *each = &group->each[k];
                Tensor *x = &each->tensor;
                *each = (Managed){{1, 0}, group, delete, 0, {0}};
                memcpy(x, at, sizeof *x);
                x->data = (void *)(base + (uintptr_t)offsets[k]);
                x->device[0] = 1, x->device[1] = 0;
                x->shape = (int64_t *)(at + sizeof *x);
                x->strides = x->shape + x->ndim;
                at += sizeof *x + 2 * shape_bytes(x);
            }
            Py_END_ALLOW_THREADS
        }
        void *x = NULL;
        if (offsets[i] < 0) {
            x = Py_NewRef(Py_None);
        } else {
            atomic_fetch_add(&group->users, 1);
            if (torch->import(&group->each[i], &x)) { /* this user is never subtracted: torch may have, or may not */
                leave(group, 1);
                Py_DECREF(made);
                return NULL;
            }
        }
        PyList_SET_ITEM(made, i, x);
    }
    leave(group, 1);
    return made;
}
