// Tables of drafted trees; see tree_build.py.

#include <algorithm>
#include <cstdint>
#include <vector>

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

// Scores are ranked and what is kept is renumbered; chosen and renumbered are [batch, keep].
extern "C" void rerank(const double* scores, const int64_t* parents, int64_t* chosen,
                       int64_t* renumbered, int64_t batch, int64_t size, int64_t keep) {
    std::vector<int64_t> order(size), place(size);
    for (int64_t tree = 0; tree < batch; tree++) {
        const double* score = scores + tree * size;
        const int64_t* up = parents + tree * size;
        int64_t *nodes = chosen + tree * keep, *above = renumbered + tree * keep;
        int64_t count = 0;
        for (int64_t node = 0; node < size; node++)
            if (up[node] != -2) order[count++] = node;
        std::stable_sort(order.begin(), order.begin() + count,
                         [&](int64_t a, int64_t b) { return score[a] > score[b]; });
        count = count < keep ? count : keep;
        std::sort(order.begin(), order.begin() + count);
        std::fill(place.begin(), place.end(), -1);
        for (int64_t i = 0; i < keep; i++) {
            nodes[i] = i < count ? order[i] : -1;
            above[i] = -2;
            if (i >= count) continue;
            place[order[i]] = i;
            above[i] = up[order[i]] < 0 ? -1 : place[up[order[i]]];
        }
    }
}
