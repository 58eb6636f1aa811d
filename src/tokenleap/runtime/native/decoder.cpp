// What passes.py calls through ctypes: a pass of a decoder takes tokens, writes keys and values to the slab, and
// returns logits.

#include "block_chain.h"
#include "fusing.h"
#include "growth.h"
#include "run.h"

#ifdef _WIN32
#define EXPORTED __declspec(dllexport)
#else
#define EXPORTED
#endif

extern "C" {

int omp_get_num_threads();  // Of PyTorch's OpenMP: on macOS and Windows, the compiler has no <omp.h>.
int omp_get_thread_num();

EXPORTED size_t tokenleap_workspace(const tokenleap::Decoder* decoder, const tokenleap::Pass* pass) {
    return tokenleap::Run(*decoder, *pass).layout(nullptr);
}

EXPORTED void tokenleap_forward(const tokenleap::Decoder* decoder, const tokenleap::Pass* pass) {
    tokenleap::Run run(*decoder, *pass);
#pragma omp parallel num_threads(pass->threads)
    {
#pragma omp single
        run.begin(omp_get_num_threads(), run.pieces());
        run.thread(omp_get_thread_num());
        run.meet(omp_get_thread_num());  // OpenMP would spin for milliseconds where a thread is missing
    }
    run.choose();
}

EXPORTED void tokenleap_grow(const tokenleap::Decoder* decoder, const tokenleap::Pass* first,
                             const tokenleap::Trees* trees) {
    tokenleap::Growth growth(*decoder, *first, *trees);
#pragma omp parallel num_threads(first->threads)
    {
#pragma omp single
        growth.begin(omp_get_num_threads());
        growth.thread(omp_get_thread_num());
    }
}

EXPORTED void tokenleap_fuse(const tokenleap::Fusion* fusion) {
    tokenleap::Fusing fusing(*fusion);
#pragma omp parallel num_threads(fusion->threads)
    {
#pragma omp single
        fusing.begin(omp_get_num_threads());
        fusing.thread(omp_get_thread_num());
        fusing.meet(omp_get_thread_num());
    }
}

EXPORTED void tokenleap_chain(const tokenleap::BlockChain* chain) {
    chain->choose();
}

EXPORTED int64_t tokenleap_draw(const tokenleap::Draw* draw, const float* probabilities, const int64_t* ids,
                                int64_t count, int32_t threads) {
    tokenleap::Race race;
    if (ids || count < 8192 || threads == 1) {
        race.run(*draw, probabilities, ids, 0, count);
        return race.winner();
    }
    tokenleap::Team team;
    std::vector<tokenleap::Race> races;
#pragma omp parallel num_threads(threads)
    {
#pragma omp single
        {
            team.expect(omp_get_num_threads(), 4);
            races.resize(team.parts());
        }
        team.each(omp_get_thread_num(), [&](int part) {
            int64_t blocks = count / 4, first = blocks * part / team.parts() * 4;
            int64_t last = part + 1 < team.parts() ? blocks * (part + 1) / team.parts() * 4 : count;
            races[part].run(*draw, probabilities, nullptr, first, last);
        });
    }
    for (const tokenleap::Race& each : races) race.join(each);
    return race.winner();
}

EXPORTED void tokenleap_draw_rows(const tokenleap::Draw* draws, const float* const* logits, int32_t rows,
                                  int64_t vocabulary, int32_t threads, int64_t* tokens) {
    tokenleap::RowDraws row_draws(draws, logits, rows, vocabulary);
#pragma omp parallel num_threads(threads)
    {
#pragma omp single
        row_draws.begin(omp_get_num_threads());
        row_draws.thread(omp_get_thread_num(), tokens);
    }
}

EXPORTED size_t tokenleap_row_bytes(const tokenleap::Linear* layer) {
    return tokenleap::row_bytes(*layer);
}

// Move the keys and values of a row's nodes, which begin at slot `start`, together (`KVSlab.commit`).
EXPORTED void tokenleap_move(const tokenleap::Buffers* buffers, int32_t layers, int64_t first_head, int32_t heads,
                             int64_t bytes, int64_t start, const int64_t* nodes, int32_t count) {
    auto move = [&](uint8_t* states, int64_t slots) {
        for (int64_t head = first_head; head < first_head + heads; head++) {
            uint8_t* base = states + (head * slots + start) * bytes;
            for (int i = 0; i < count; i++)
                if (nodes[i] != i) std::memcpy(base + i * bytes, base + nodes[i] * bytes, bytes);
        }
    };
    for (int layer = 0; layer < layers; layer++) {
        move(buffers[layer].keys, buffers[layer].key_slots);
        move(buffers[layer].values, buffers[layer].value_slots);
    }
}

// Sizes of the structures that structures.py and pack.py repeat, and the largest hidden size.
EXPORTED void tokenleap_sizes(int32_t* sizes) {
    using namespace tokenleap;
    sizes[0] = sizeof(Linear);
    sizes[1] = sizeof(Layer);
    sizes[2] = sizeof(Decoder);
    sizes[3] = sizeof(Pass);
    sizes[4] = sizeof(Tree);
    sizes[5] = sizeof(Trees);
    sizes[6] = sizeof(Fusion);
    sizes[7] = sizeof(Draw);
    sizes[8] = sizeof(Source);
    sizes[9] = sizeof(BlockChain);
    sizes[10] = sizeof(Buffers);
    sizes[11] = MOST_HIDDEN_SIZE;
}
}
