// Problem → its message on the wire. Only what differs from a field's absence is set, so that the
// header of a plain call is a few dozen bytes. Any thread.
#pragma once

#include "attention/problem.h"
#include "proto/attnd/v1/attention.pb.h"

namespace attnd {

// `problem` is valid.
enum class MaskForm {
  kWhole,
  kId,  // a mask that the server should know
};
v1::Problem ToProto(const Problem& problem, MaskForm mask = MaskForm::kWhole);
// With this in the mask's place.
v1::Problem ToProto(const Problem& problem, v1::MaskSpec mask);

}  // namespace attnd
