// Handlers of layers and of products, in one unit, since XLA's headers take longer to compile than each of them.

#include "adapted.cc"
#include "attention.cc"
#include "blocks.cc"
#include "encoder_layer.cc"
#include "experts.cc"
#include "linear.cc"
#include "products.cc"
#include "segments.cc"
