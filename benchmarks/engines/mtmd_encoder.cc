// How long llama.cpp's encoder of pictures takes: mtmd_encoder MODEL MMPROJ SIDE TILES THREADS
//
// Encodes TILES random pictures of SIDE x SIDE at once for each line of standard input, and answers with a line of JSON:
// seconds of the clock ("wall") and of all processors ("cpu").
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <vector>

#include "llama.h"
#include "mtmd.h"

static void fail(const char * what) {
    std::fprintf(stderr, "mtmd_encoder: %s\n", what);
    std::exit(1);
}

int main(int argc, char ** argv) {
    if (argc != 6) fail("MODEL MMPROJ SIDE TILES THREADS");
    const int side = std::atoi(argv[3]), tiles = std::atoi(argv[4]);
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) fail("the model cannot be read");
    mtmd_context_params params = mtmd_context_params_default();
    params.use_gpu = false;
    params.n_threads = std::atoi(argv[5]);
    params.batch_max_tokens = 1 << 20;
    mtmd_context * vision = mtmd_init_from_file(argv[2], model, params);
    if (!vision) fail("the encoder cannot be read");

    std::vector<unsigned char> pixels(size_t(side) * side * 3);
    for (auto & value : pixels) value = std::rand() >> 8;
    const mtmd_bitmap * bitmap = mtmd_bitmap_init(side, side, pixels.data());
    const char * prompt = mtmd_default_marker();
    const mtmd_input_text text = {prompt, std::strlen(prompt), false, true};
    std::vector<const mtmd_input_chunk *> pictures;
    for (int tile = 0; tile < tiles; tile++) {
        mtmd_input_chunks * chunks = mtmd_input_chunks_init();
        if (mtmd_tokenize(vision, chunks, &text, &bitmap, 1) != 0) fail("the picture cannot be prepared");
        // A tile is followed by a small view of the whole picture, which is of the same size here.
        for (size_t i = 0; pictures.size() <= size_t(tile); i++) {
            if (i == mtmd_input_chunks_size(chunks)) fail("the picture has no tile");
            const mtmd_input_chunk * chunk = mtmd_input_chunks_get(chunks, i);
            if (mtmd_input_chunk_get_type(chunk) == MTMD_INPUT_CHUNK_TYPE_IMAGE) pictures.push_back(chunk);
        }
    }

    char line[64];
    while (std::fgets(line, sizeof line, stdin)) {
        const auto wall = std::chrono::steady_clock::now();
        const std::clock_t cpu = std::clock();
        mtmd_batch * batch = mtmd_batch_init(vision);
        bool together = true;
        for (const mtmd_input_chunk * picture : pictures) together = together && mtmd_batch_add_chunk(batch, picture) == 0;
        if (together && mtmd_batch_encode(batch) != 0) fail("the pictures cannot be encoded");
        mtmd_batch_free(batch);
        if (!together) {  // encoders that take one picture at a time
            for (const mtmd_input_chunk * picture : pictures) {
                if (mtmd_encode_chunk(vision, picture) != 0) fail("a picture cannot be encoded");
            }
        }
        const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - wall;
        std::printf("{\"wall\": %.6f, \"cpu\": %.6f}\n", taken.count(), double(std::clock() - cpu) / CLOCKS_PER_SEC);
        std::fflush(stdout);
    }
    return 0;
}
