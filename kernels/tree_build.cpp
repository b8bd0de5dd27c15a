// Tables of drafted trees; see tree_build.py.

#include <algorithm>
#include <cstdint>

extern "C" void build_trees(const int64_t* parents, int32_t* ancestry, int64_t* first,
                            int64_t* following, int64_t batch, int64_t columns) {
    for (int64_t tree = 0; tree < batch; tree++) {
        const int64_t* up = parents + tree * columns;
        int64_t *child = first + tree * columns, *sibling = following + tree * columns;
        std::fill(child, child + columns, -1);
        for (int64_t column = columns - 1; column >= 0; column--) {
            int32_t* row = ancestry + (tree * columns + column) * columns;
            std::fill(row, row + columns, 0);
            sibling[column] = -1;
            if (up[column] == -2) continue;  // behind the tree's last column
            int32_t step = 0;
            for (int64_t node = column; node >= 0; node = up[node]) row[node] = ++step;
            if (up[column] >= 0) {
                sibling[column] = child[up[column]];
                child[up[column]] = column;
            } else {
                for (int64_t other = column + 1; other < columns && sibling[column] < 0; other++)
                    if (up[other] == -1) sibling[column] = other;
            }
        }
    }
}
