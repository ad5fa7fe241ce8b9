// Standard streams that are closed when a program starts (2>&- in a script, some supervisors) would
// be the numbers of its first sockets: the log would then be written to a caller.
#pragma once

namespace attnd {

// Gives closed standard streams something that can be neither read nor written, so that using them
// fails as before. To be called first in main.
void OccupyStandardStreams();

}  // namespace attnd
