// Handlers of recurrent mixers, sampling and memory, in one unit as in layers.cc.

#include "recording.cc"
#include "recurrent.cc"
#include "sampling.cc"
#include "shared_sum.cc"
#include "zeros.cc"
