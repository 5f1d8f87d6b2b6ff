// Turns the recording of what threads do on and off, and reads it.

#include "recording.h"

#pragma GCC visibility push(default)

// From now on, with all counts at zero; 0: no more.
extern "C" void llmjax_record(int on) {
  llmjax::Recording& recording = llmjax::recording();
  recording.on = false;
  if (on == 0) return;
  for (int i = 0; i < llmjax::kWorks; ++i) recording.busy[i] = recording.waiting[i] = 0;
  recording.calling = recording.calls = recording.phases = 0;
  recording.on = true;
}

// To [2 * kWorks + 3]: `busy`, `waiting`, `calling`, `calls` and `phases`.
extern "C" void llmjax_recorded(int64_t* to) {
  const llmjax::Recording& recording = llmjax::recording();
  for (int i = 0; i < llmjax::kWorks; ++i) to[i] = recording.busy[i], to[llmjax::kWorks + i] = recording.waiting[i];
  to += 2 * llmjax::kWorks;
  to[0] = recording.calling, to[1] = recording.calls, to[2] = recording.phases;
}

#pragma GCC visibility pop
