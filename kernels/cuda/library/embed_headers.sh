#!/bin/sh
# Writes C++ that holds each given file as a string, by the name under which it is included.
echo '#include "kernels/cuda/library/kernel_source.h"'
echo 'namespace attnd {'
echo 'const std::vector<EmbeddedFile>& DeviceHeaders() {'
echo '  static const std::vector<EmbeddedFile>& files = *new std::vector<EmbeddedFile>{'
for file in "$@"; do
  printf '{"%s", R"attnd(' "$file"
  cat "$file"
  printf ')attnd"},\n'
done
echo '  };'
echo '  return files;'
echo '}'
echo '}  // namespace attnd'
