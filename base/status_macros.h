// RETURN_IF_ERROR and ASSIGN_OR_RETURN, which abseil 20220623 does not have.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define RETURN_IF_ERROR(expression)                           \
  do {                                                        \
    if (absl::Status status_ = (expression); !status_.ok()) { \
      return status_;                                         \
    }                                                         \
  } while (false)

#define ATTND_CONCAT_INNER(a, b) a##b
#define ATTND_CONCAT(a, b) ATTND_CONCAT_INNER(a, b)

#define ASSIGN_OR_RETURN(declaration, expression) \
  ASSIGN_OR_RETURN_NAMED(ATTND_CONCAT(status_or_, __LINE__), declaration, expression)

#define ASSIGN_OR_RETURN_NAMED(name, declaration, expression) \
  auto name = (expression);                                   \
  if (!name.ok()) return std::move(name).status();            \
  declaration = *std::move(name)
