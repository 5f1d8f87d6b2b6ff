// What llama.cpp makes of one picture in a prompt:
//   mtmd_rows MODEL MMPROJ PICTURE WIDTH HEIGHT PROMPT COUNT ROWS
// PICTURE holds WIDTH x HEIGHT x 3 bytes. ROWS gets the feature rows of all pictures' chunks as f32. Standard output has
// a line for each chunk of the prompt ("text ID ...", "image COUNT"), "width" of a row, and "next" with the COUNT tokens
// that follow it greedily.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "llama.h"
#include "mtmd-helper.h"
#include "mtmd.h"

static void fail(const char * what) {
    std::fprintf(stderr, "mtmd_rows: %s\n", what);
    std::exit(1);
}

int main(int argc, char ** argv) {
    if (argc != 9) fail("MODEL MMPROJ PICTURE WIDTH HEIGHT PROMPT COUNT ROWS");
    const int width = std::atoi(argv[4]), height = std::atoi(argv[5]), count = std::atoi(argv[7]);
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) fail("the model cannot be read");

    // In f32 throughout: no flash attention, whose keys and values are f16.
    mtmd_context_params vision_params = mtmd_context_params_default();
    vision_params.use_gpu = false;
    vision_params.n_threads = 2;
    vision_params.warmup = false;
    vision_params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    mtmd_context * vision = mtmd_init_from_file(argv[2], model, vision_params);
    if (!vision) fail("the encoder cannot be read");

    std::vector<unsigned char> pixels(size_t(width) * height * 3);
    FILE * file = std::fopen(argv[3], "rb");
    if (!file || std::fread(pixels.data(), 1, pixels.size(), file) != pixels.size()) fail("the picture is too short");
    std::fclose(file);
    const mtmd_bitmap * bitmap = mtmd_bitmap_init(width, height, pixels.data());

    const mtmd_input_text text = {argv[6], std::strlen(argv[6]), false, true};
    mtmd_input_chunks * chunks = mtmd_input_chunks_init();
    if (mtmd_tokenize(vision, chunks, &text, &bitmap, 1) != 0) fail("the prompt cannot be tokenized");

    FILE * rows = std::fopen(argv[8], "wb");
    if (!rows) fail("ROWS cannot be written");
    const size_t row = llama_model_n_embd_inp(model);
    for (size_t i = 0; i < mtmd_input_chunks_size(chunks); i++) {
        const mtmd_input_chunk * chunk = mtmd_input_chunks_get(chunks, i);
        const size_t tokens = mtmd_input_chunk_get_n_tokens(chunk);
        if (mtmd_input_chunk_get_type(chunk) == MTMD_INPUT_CHUNK_TYPE_TEXT) {
            size_t length = 0;
            const llama_token * ids = mtmd_input_chunk_get_tokens_text(chunk, &length);
            std::printf("text");
            for (size_t k = 0; k < length; k++) std::printf(" %d", ids[k]);
            std::printf("\n");
            continue;
        }
        std::printf("image %zu\n", tokens);
        if (mtmd_encode_chunk(vision, chunk) != 0) fail("the picture cannot be encoded");
        std::fwrite(mtmd_get_output_embd(vision), sizeof(float), tokens * row, rows);
    }
    std::fclose(rows);
    std::printf("width %zu\n", row);

    if (count > 0) {
        llama_context_params params = llama_context_default_params();
        params.n_ctx = 4096;
        params.n_batch = params.n_ubatch = 2048;
        params.n_threads = params.n_threads_batch = 2;
        params.type_k = params.type_v = GGML_TYPE_F32;
        params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
        llama_context * context = llama_init_from_model(model, params);
        if (!context) fail("the context cannot be made");
        const int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
        llama_pos past = 0;
        if (mtmd_helper_eval_chunks(vision, context, chunks, 0, 0, 2048, true, &past) != 0) fail("the prompt fails");
        std::printf("next");
        llama_batch batch = llama_batch_init(1, 0, 1);
        for (int i = 0; i < count; i++) {
            const float * logits = llama_get_logits_ith(context, -1);
            const llama_token token = llama_token(std::max_element(logits, logits + vocab) - logits);
            std::printf(" %d", token);
            batch.n_tokens = 1;
            batch.token[0] = token;
            batch.pos[0] = past++;
            batch.n_seq_id[0] = 1;
            batch.seq_id[0][0] = 0;
            batch.logits[0] = 1;
            if (llama_decode(context, batch) != 0) fail("a token fails");
        }
        std::printf("\n");
    }
    return 0;
}
