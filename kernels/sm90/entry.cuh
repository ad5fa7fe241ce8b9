#pragma once
#include "kernels/sm90/forward.h"
