/* One forward and one backward of causal attention, in C99 or C++20:
 *
 *     cc attention.c -o attention $(pkg-config --cflags --libs attnd) && ./attention 127.0.0.1:7070
 *
 * Equal keys make equal weights, so row i of O is the mean of the values 0 to i. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "attnd_client.h"

enum { kLength = 4, kDim = 8, kElements = kLength * kDim };

static void Expect(int code, attnd_call* call) {
  if (code == ATTND_OK) return;
  fprintf(stderr, "attention: %s\n", attnd_call_message(call));
  exit(1);
}

int main(int argc, char** argv) {
  const char* address = argc > 1 ? argv[1] : "127.0.0.1:7070";
  attnd_call* call = attnd_call_new(NULL, 30.0, ATTND_PRIORITY_NORMAL);
  attnd_client_options options = {sizeof(options), &address, 1};
  attnd_client* client = attnd_client_new(&options, call);
  if (client == NULL) Expect(attnd_call_code(call), call);

  static float q[kElements], k[kElements], v[kElements], o[kElements], lse[kLength];
  static float d_o[kElements], d_q[kElements], d_k[kElements], d_v[kElements];
  for (int n = 0; n < kElements; ++n) v[n] = (float)(n / kDim), d_o[n] = 1;

  attnd_problem problem = {sizeof(problem), 1, 1, 1, kLength, kLength, kDim, kDim};
  problem.element = ATTND_FLOAT32;
  problem.layout = ATTND_BHLD;
  problem.alignment = ATTND_TOP_LEFT;
  problem.causal = 1;
  attnd_residual* residual = NULL;
  attnd_forward_tensors forward = {sizeof(forward), q, k, v, NULL, NULL, o, lse, &residual};
  Expect(attnd_forward(client, &problem, &forward, call), call);

  attnd_backward_tensors backward = {sizeof(backward), q, k, v, NULL, NULL, o, lse, d_o};
  backward.d_q = d_q;
  backward.d_k = d_k;
  backward.d_v = d_v;
  backward.residual = residual;
  Expect(attnd_backward(client, &problem, &backward, call), call);

  int wrong = 0;
  for (int i = 0; i < kLength; ++i) {
    float weight = 0; /* of value i: 1 / (j + 1) of each row j that sees it */
    for (int j = i; j < kLength; ++j) weight += 1.0f / (float)(j + 1);
    printf("row %d: O %.3f, expected %.3f; dV %.3f, expected %.3f\n", i, o[i * kDim], (float)i / 2,
           d_v[i * kDim], weight);
    wrong += fabsf(o[i * kDim] - (float)i / 2) > 1e-5f || fabsf(d_v[i * kDim] - weight) > 1e-5f;
  }
  attnd_residual_free(residual);
  attnd_client_free(client);
  attnd_call_free(call);
  return wrong != 0;
}
