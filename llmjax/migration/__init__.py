"""What flags and constructor arguments of other programs mean here: tables, their reading, their page in the docs."""
