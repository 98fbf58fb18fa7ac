# Stands in for CMake's module of this name.
set(Python3_FOUND TRUE)
set(Python3_EXECUTABLE "${CMAKE_COMMAND}")
