// Attention of a whole batch in one call; see few_rows.py.

#include "few_rows.h"

using namespace attention;

template <class T>
static void run(const Shape& s, const T* q, const T* keys, const T* values, T* out) {
#pragma omp parallel if (s.batch * s.key_heads > 1)
    {
        std::vector<wide<T>> memory;
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t sequence = 0; sequence < s.batch; sequence++)
            for (int64_t head = 0; head < s.key_heads; head++) {
                const Task<T> task(s, sequence, head);
                if (task.rows && task.rows <= s.most)
                    attend(task, q, keys, values, out, memory);
            }
    }
}

extern "C" void attend(int type, const void* q, const void* keys, const void* values, void* out,
                       const Shape* shape) {
#define CALL(T) run(*shape, (const T*)q, (const T*)keys, (const T*)values, (T*)out)
    BY_TYPE(type, CALL)
}
