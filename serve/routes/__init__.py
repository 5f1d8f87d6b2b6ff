"""One module a group of endpoints; each turns a protocol type into engine calls and the outputs into a response."""
