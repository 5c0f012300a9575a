# Builds the source of Horovod 0.28.1, edited (horovod_edits.py), against today's torch. CMake reads this file from the environment
# variable CMAKE_TOOLCHAIN_FILE, once for the project and once for every sub-project and try_compile.

get_property(_trying GLOBAL PROPERTY IN_TRY_COMPILE)
get_property(_done GLOBAL PROPERTY TRAINKIT_HOROVOD)
if(_trying OR _done OR NOT EXISTS "${CMAKE_SOURCE_DIR}/horovod/torch/CMakeLists.txt")
  return()
endif()
set_property(GLOBAL PROPERTY TRAINKIT_HOROVOD ON)

# A build without GPU operations has no use for a CUDA compiler, and one that does not work would end it.
if(NOT DEFINED ENV{HOROVOD_GPU_OPERATIONS})
  set(CMAKE_CUDA_COMPILER "")
  set(CMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit ON)
endif()

# Nobody debugs it: without -g a quarter of the compile time goes. Horovod's own build type, RelWithDebInfo, names -g.
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -DNDEBUG" CACHE STRING "")

# Horovod pins C++14 in its own files; the headers of torch 2.15 refuse less than C++20. A property of the target,
# set after all directories were read, has the last word.
function(trainkit_raise_standard)
  foreach(target pytorch gloo)
    if(TARGET ${target})
      set_target_properties(${target} PROPERTIES CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON)
    endif()
  endforeach()
  if(TARGET pytorch)
    if(NOT DEFINED ENV{HOROVOD_GPU_OPERATIONS})
      # torch's headers, most of the compile time, are read once for twelve files.
      set_target_properties(pytorch PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 12)
    endif()
    set_property(TARGET pytorch APPEND PROPERTY LINK_OPTIONS -s)  # no debugging symbols, 95 % of the wheel
  endif()
endfunction()
cmake_language(DEFER DIRECTORY "${CMAKE_SOURCE_DIR}" CALL trainkit_raise_standard)
