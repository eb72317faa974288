#pragma once
#include "launch.h"
