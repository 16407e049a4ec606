// A trace function that marks each line that Python executes, in memory which all processes of a test share.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

static Py_buffer marks;           // one byte for each line of all observed files
static PyObject* starts;          // name of a file: index of its first line
static PyObject* trace_function;  // trace(), as sys.gettrace() returns it

static int on_event(PyObject* self, PyFrameObject* frame, int what, PyObject* argument) {
    if (what != PyTrace_LINE) return 0;
    PyCodeObject* code = PyFrame_GetCode(frame);
    PyObject* start = PyDict_GetItemWithError(starts, code->co_filename);
    Py_DECREF(code);
    if (!start) return 0;
    const Py_ssize_t index = PyLong_AsSsize_t(start) + PyFrame_GetLineNumber(frame);
    if (index >= 0 && index < marks.len) ((unsigned char*)marks.buf)[index] = 1;
    return 0;
}

// Has the signature of a trace function of Python, so that threading.settrace() accepts it.
static PyObject* trace(PyObject* self, PyObject* arguments) {
    PyEval_SetTrace(on_event, trace_function);
    Py_RETURN_NONE;
}

static PyObject* start(PyObject* self, PyObject* arguments) {
    PyObject *memory, *files;
    if (!PyArg_ParseTuple(arguments, "OO!", &memory, &PyDict_Type, &files)) return NULL;
    Py_buffer buffer;
    if (PyObject_GetBuffer(memory, &buffer, PyBUF_WRITABLE)) return NULL;
    marks = buffer;  // never released
    Py_INCREF(files);
    starts = files;
    if (!trace_function) trace_function = PyObject_GetAttrString(self, "trace");
    if (!trace_function) return NULL;
    return trace(self, arguments);
}

static PyMethodDef methods[] = {
    {"start", start, METH_VARARGS, "Mark lines in a writable buffer; the second argument has the index of each file."},
    {"trace", trace, METH_VARARGS, "Mark the lines of this thread."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "line_marks_python", NULL, -1, methods};

PyMODINIT_FUNC PyInit_line_marks_python(void) {
    return PyModule_Create(&module);
}
